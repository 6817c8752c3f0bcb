"""The user that a uid counts as in limits per owner: a range of subordinate uids counts as its user.

In a user namespace, such as that of a rootless container, a user has 65,536 uids (subuid(5)). Without this, each of
them would be an owner with a share of its own. A range whose user is not a person, like Kubernetes' `kubelet` or LXD's
`root`, holds the uids of several pods or containers, with 65,536 each: there, each block of so many uids counts as one.
"""

from __future__ import annotations

import pwd
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

SUBUID = Path("/etc/subuid")
BLOCK = 65_536
FIRST_USER = 1000
"""The least uid of a person: UID_MIN in login.defs(5)."""


class SubordinateIds:
    """The ranges of `path`. Only `refresh` reads the file and looks up names, since a directory service may hang."""

    def __init__(self, path: Path = SUBUID, lookup: Callable[[str], int | None] | None = None) -> None:
        """Set the file, and the function that returns the uid of a user's name; None without such a user."""
        self._path, self._lookup = path, lookup or _uid
        self._ranges: tuple[tuple[int, int, str], ...] = ()
        """First uid, number of uids, and user, sorted."""
        self._users: dict[str, int | None] = {}
        self._wanted: set[str] = set()
        self._stamp: tuple[int, int, int] | None = None

    def principal(self, uid: int) -> int:
        """Return the user of the range that contains the uid, or the first uid of its block; the uid itself if none."""
        ranges = self._ranges
        for index in range(bisect_right(ranges, (uid, inf)) - 1, -1, -1):
            first, count, name = ranges[index]
            if uid < first + count:
                if name not in self._users:
                    self._wanted.add(name)
                user = self._users.get(name)
                return uid - (uid - first) % BLOCK if user is None else user
        return uid

    def refresh(self) -> None:
        """Read the file again if it has changed, and look up the users of the ranges that were asked for."""
        stamp = None
        with suppress(OSError):
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if stamp != self._stamp:
            ranges = tuple(sorted(_parse(self._path))) if stamp else ()
            self._users, self._ranges, self._stamp = {}, ranges, stamp
        for name in [*self._wanted]:
            user = int(name) if name.isdecimal() else self._lookup(name)
            self._users[name] = user if user is not None and user >= FIRST_USER else None
            self._wanted.discard(name)


def _parse(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges. Lines of another form are skipped, as newuidmap(1) does."""
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, *numbers = line.strip().split(":")
            if name and len(numbers) == 2 and all(number.isdecimal() and len(number) <= 10 for number in numbers):
                yield int(numbers[0]), int(numbers[1]), name


def _uid(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


SUBORDINATE_IDS = SubordinateIds()
principal = SUBORDINATE_IDS.principal


def principal_of(owner: str) -> str:
    """Return the same for the label `owner`, which is empty with `--collector.ranks.owner=none`."""
    return str(principal(int(owner))) if owner.isdecimal() else owner
