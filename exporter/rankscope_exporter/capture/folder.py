"""The directory of captures: one folder each, written as a hidden draft, handed over when it is complete.

Only the exporter's user can write to it. A folder is private, and its run's owner may read it through an access control
list: the owner can neither change a file nor replace one by a link. All names are looked up in open directories, and
nothing follows a link.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.record.directory import open_untrusted
from rankscope_exporter.capture.source import cut
from rankscope_exporter.capture.torch_dumps import BYTES as DUMPS_LIMIT

FIGURES, REPORT = "capture.json", "report.html"
DRAFT, DRAFT_SECONDS = ".draft-", 600.0
"""The begin of the name of a capture that is being written, and the age from which no process writes it any more."""
FILE_LIMIT, CAPTURE_LIMIT, SMALLEST = 2 * 2**20, 8 * 2**20, 1024
"""The most bytes of a text, and of all texts, and what each may have."""
RESERVED = CAPTURE_LIMIT + DUMPS_LIMIT
"""The most bytes of a capture."""
CAPTURES_LIMIT = 200
"""The most captures of all users."""
NAME_LIMIT, NAMES_TRIED = 64, 100
READ_LIMIT = 64 * 1024
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
OWNER_TAG, USER, GROUP, MASK, OTHER, NO_ID = 1, 2, 4, 16, 32, 2**32 - 1
"""Entries of an access control list: linux/posix_acl_xattr.h."""


class FolderError(Exception):
    """A capture cannot be written. `reason` is `no_space` or `io`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.reason = "no_space" if error.errno in NO_SPACE else "io"


@contextmanager
def _raising_folder_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(error) from error


class Kept(NamedTuple):
    """A capture in the directory."""

    name: str
    at: float
    run: str
    owner: str
    size: int
    sentence: str


def folder_name(run: str, at: float, reason: str) -> str:
    """Return the name of a capture's folder; any user can choose the name of a run."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", run)[:NAME_LIMIT].strip("._-") or "run"
    return f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(at))}-{reason}"


class Folder:
    """A capture that is being written. In a `with` statement, what is not published is removed."""

    def __init__(self, directory: int, name: str, owner: int) -> None:
        """Create the draft in the open directory. Raise FolderError."""
        self._directory, self._owner, self.name = directory, owner, name
        self._draft = f"{DRAFT}{os.getpid()}-{time.monotonic_ns()}"
        self.size = self._texts = 0
        with _raising_folder_errors():
            os.mkdir(self._draft, 0o700, dir_fd=directory)
            self._descriptor = os.open(self._draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        self.is_shared = owner == os.geteuid() or _allow(self._descriptor, owner, DEFAULT)
        """Whether the run's owner may read it; else the file system has no access control lists."""

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        if self._draft:
            _remove(self._directory, self._draft)

    def write(self, name: str, text: str) -> int:
        """Write a file, cut off at the limits, and return its bytes. Raise FolderError."""
        limit = max(min(FILE_LIMIT, CAPTURE_LIMIT - self._texts), SMALLEST)
        data = cut(text, limit).encode(errors="replace")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            _raising_folder_errors(),
            open(os.open(name, flags, 0o640, dir_fd=self._descriptor), "wb") as file,  # noqa: PTH123 - a descriptor
        ):
            file.write(data)
        self.size += len(data)
        self._texts += len(data)
        return len(data)

    @contextmanager
    def files(self, name: str) -> Iterator[Path]:
        """Yield the path of a new folder in it for files of another process, which limits their bytes."""
        with _raising_folder_errors():
            os.mkdir(name, 0o750, dir_fd=self._descriptor)
        path = Path(f"/proc/self/fd/{self._descriptor}").readlink() / name
        yield path
        with suppress(OSError):
            for file in path.iterdir():
                file.chmod(0o640)  # else the mask of the list hides it from the run's owner
                self.size += file.stat().st_size
            path.rmdir()  # without files

    def publish(self) -> str:
        """Hand it over, and return its name, which has a number if the directory has one of that name."""
        with _raising_folder_errors():
            known = {one.name for one in os.scandir(self._directory)}
            names = (self.name, *(f"{self.name}-{number}" for number in range(2, NAMES_TRIED)))
            name = next((one for one in names if one not in known), names[-1])
            if self.is_shared and self._owner != os.geteuid():
                _allow(self._descriptor, self._owner, ACCESS)
            os.rename(self._draft, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._draft = ""
        return name


def _allow(descriptor: int, user: int, which: str) -> bool:
    """Let a user read the open directory, or by DEFAULT what is created in it. Return False without such lists."""
    entries = ((OWNER_TAG, 7, NO_ID), (USER, 5, user), (GROUP, 0, NO_ID), (MASK, 5, NO_ID), (OTHER, 0, NO_ID))
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(descriptor, which, value)
    except OSError:
        return False
    return True


def kept(directory: int) -> Iterator[Kept]:
    """Yield the captures in the open directory, the newest first."""
    found = []
    for name in [one.name for one in os.scandir(directory)]:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found.append(_read(directory, name))
    now = time.time()  # the clock may have been set back: what is of the future then is the oldest
    yield from sorted(found, key=lambda one: one.at if one.at <= now else 0.0, reverse=True)


def _read(directory: int, name: str) -> Kept:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        with open(open_untrusted(FIGURES, descriptor), "rb") as file:  # noqa: PTH123 - a descriptor
            figures: Mapping[str, Any] = json.loads(file.read(READ_LIMIT))
    finally:
        os.close(descriptor)
    run, owner, sentence = (str(figures[name]) for name in ("run", "owner", "sentence"))
    return Kept(name, float(figures["at"]), run, owner, int(figures["bytes"]), sentence)


def prune(directory: int, limit: int, seconds: float, principal: Callable[[int], int] = int) -> None:
    """Remove drafts that were left behind, what is too old, and the oldest of the user with the most bytes.

    `limit` is the most bytes of all captures, in addition to one that is about to be written.
    """
    by_user: dict[int, list[Kept]] = defaultdict(list)
    now = time.time()
    for name in [one.name for one in os.scandir(directory)]:
        if name.startswith(DRAFT):
            with suppress(OSError):  # `rankscope capture` may have published it meanwhile
                modified = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
                if abs(now - modified) > DRAFT_SECONDS:  # also if the clock was set back
                    _remove(directory, name)
    for one in kept(directory):
        if now - one.at > seconds:
            _remove(directory, one.name)
        else:
            by_user[principal(int(one.owner)) if one.owner.isdecimal() else -1].append(one)
    captures = [*by_user.values()]
    while sum(map(len, captures)) >= CAPTURES_LIMIT or sum(map(_size, captures)) > limit - RESERVED:
        largest = max(captures, key=lambda of_user: (_size(of_user), len(of_user)), default=[])
        if not largest:
            return
        _remove(directory, largest.pop().name)


def _size(captures: list[Kept]) -> int:
    return sum(one.size for one in captures)


def _remove(directory: int, name: str) -> None:
    """Remove a folder."""
    with suppress(OSError):
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        try:
            for file in os.scandir(descriptor):
                if file.is_dir(follow_symlinks=False):
                    _remove(descriptor, file.name)
                else:
                    os.unlink(file.name, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=directory)


def open_captures(path: Path) -> int:
    """Open the directory of captures. Raise FolderError."""
    with _raising_folder_errors():
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
