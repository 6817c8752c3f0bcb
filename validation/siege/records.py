"""Attacks on the run directory: each is a generator that does one or several acts, and yields."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from testing import crowd
from testing.records import publish
from validation.fuzz.rank_files import damaged
from validation.siege.target import GPUS, RUN, VICTIM, Held, Seen, Target

from rankscope.record import layout
from rankscope.record.group_name import LARGEST
from rankscope.record.layout import INDEX
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.writer import RankWriter
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.simulation import simulated_uuid

NAMES = 9000  # at once: more than an exporter reads in one scan
NAMES_AN_ACT = 200
LIVING = 300  # records of one process: more than the ranks on a page
RANKS_OF_A_USER = 128
CHILDREN, CHILDREN_AN_ACT = 1500, 100
DEAD = 60
RANKS_WITH_LARGE_GROUPS = 64
DAMAGED = 100
DESCRIPTORS = 100
MANY_UIDS, USERS_AT_ONCE = 200_000, 48
COSTLY_UIDS = 300_000
COSTLY = (4, 15, 4)
"""Owners, runs of each and ranks of each run."""
RUNS_WITH_LONG_NAMES, LONG = 128, "\N{GRINNING FACE}" * 65  # a character takes 12 bytes in JSON
READ_LOCK = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)


def flooded(target: Target, seen: Seen) -> Generator[None]:
    """Create and remove thousands of empty files."""
    with Held(_delete, NAMES) as present:
        for number in count():
            present.hold(Path(target.run_dir, f"flood-{number}.rank")).touch()
            seen["made"] += 1
            if number % NAMES_AN_ACT == NAMES_AN_ACT - 1:
                yield


def crowded(target: Target, seen: Seen) -> Generator[None]:
    """Publish hundreds of live ranks, each with its own run; ten at a time change their names."""
    with Held(_remove, LIVING) as living:
        for number in count():
            living.hold(_publish(target, f"crowd-{number}", run=f"crowd-{number}"))
            seen["published"] += 1
            if number % 10 == 9:
                yield


def many_children(target: Target, seen: Seen) -> Generator[None]:
    """Be as many ranks as one user may have, with far more children, ten of which change at a time."""
    names = (f"parent-{number}" for number in range(RANKS_OF_A_USER))
    with Held(_remove, first=[_publish(target, name, run=name) for name in names]), Held(_end, CHILDREN) as children:
        while True:
            for _ in range(CHILDREN_AN_ACT if len(children) < CHILDREN else 10):
                children.hold(subprocess.Popen(["sleep", "3600"]))
                seen["children"] += 1
            yield


def forged_living(target: Target, seen: Seen) -> Generator[None]:
    """Publish live ranks of the victim's run: its own numbers with a later start, an impossible one, one of tomorrow.

    They claim to wait for data, and make no progress.
    """
    now = time.time()
    forgeries = {"0": now, "1": now, "999": now, "000": now, "2": now + 86_400}
    forged = [_publish(target, f"forged-{rank}", now=at, rank=rank) for rank, at in forgeries.items()]
    with Held(_remove, first=forged) as living:
        while True:
            for writer in living:
                writer.slots[INDEX["phase_seconds"] + layout.DATA_WAIT] += 1.0
                for start in ("started_monotonic", "started_unix"):
                    writer.slots[INDEX[start]] += 0.1
                seen["forged updates"] += 1
            yield


def forged_dead(target: Target, seen: Seen) -> Generator[None]:
    """Publish ranks of the victim's run that have just crashed, or were killed."""
    with Held(_delete, DEAD) as dead:
        for number in count():
            rank = ("0", "1", "999")[number % 3]
            writer = _publish(target, f"dead-{number}", rank=rank)
            if number % 2:
                writer.slots[INDEX["ended"]] = layout.EXCEPTION
                writer.slots[INDEX["ended_unix"]] = time.time()
            assert writer.path is not None
            dead.hold(writer.path)
            writer.detach()
            seen["crashed"] += 1
            yield


def forged_uuids(target: Target, seen: Seen) -> Generator[None]:
    """Publish live ranks of another run on each GPU of the node, which change GPUs at each act."""
    uuids = [simulated_uuid(number) for number in range(GPUS)]
    stolen = [_publish(target, f"gpu-{n}", run="stolen", rank=str(n), uuid=uuid) for n, uuid in enumerate(uuids)]
    with Held(_remove, first=stolen) as living:
        for turn in count():
            for number, writer in enumerate(living):
                labels = _labels(target) | {"run": "stolen", "rank": str(number)}
                writer.write_info(labels | {"uuid": uuids[(number + turn) % GPUS]})
                seen["claimed"] += 1
            yield


def large_groups(target: Target, seen: Seen) -> Generator[None]:
    """Publish live ranks that wait in as many groups as a record has, each of up to 100,000 ranks, all of them new."""
    world = {"run": "large", "world_size": str(LARGEST)}
    large = [_publish(target, f"large-{n}", None, rank=str(n), **world) for n in range(RANKS_WITH_LARGE_GROUPS)]
    with Held(_remove, first=large) as living:
        for turn in count():
            lasts = (LARGEST - 1 - (turn * layout.MAX_GROUPS + n) % 1000 for n in range(layout.MAX_GROUPS))
            names = [f"0-{last}" + ":2" * (last % 2) for last in lasts]
            groups = {"groups": names, "group_descriptions": ["mesh_pp"] * len(names)}
            for number, writer in enumerate(living):
                writer.write_info(_labels(target) | world | {"rank": str(number)} | groups)
                for group in range(layout.MAX_GROUPS):
                    writer.slots[INDEX["group_wait_seconds"] + group] += 0.1
                seen["groups named"] += len(names)
            yield


def many_users(target: Target, seen: Seen) -> Generator[None]:
    """Publish ranks of many users with costly records, all of which become other users every few seconds."""
    for _ in crowd.act(Path(target.run_dir), MANY_UIDS, USERS_AT_ONCE, 1, 1, "hostile", 5.0):
        seen["updates of all users"] += 1
        yield


def costly_runs(target: Target, seen: Seen) -> Generator[None]:
    """Publish the most runs that are diagnosed, of several users, in which all counters increase at each poll."""
    for _ in crowd.act(Path(target.run_dir), COSTLY_UIDS, *COSTLY, "hostile"):
        seen["updates of all runs"] += 1
        yield


def long_names(target: Target, seen: Seen) -> Generator[None]:
    """Publish runs with long names of phases, each time with another rank, and end them, to fill the state."""
    phases = [f"{number}-{LONG}" for number in range(20)]
    for turn in count():
        with Held(_remove) as living:
            for number in range(RUNS_WITH_LONG_NAMES):
                labels = _labels(target) | {"run": f"long-{number}", "rank": str(turn % 64), "world_size": "64"}
                labels |= {"group": "0-63", "phases": phases}
                writer = living.hold(_publish(target, f"long-{number}-{turn}", **labels))
                for position in range(len(layout.PHASES) + len(phases)):
                    writer.slots[INDEX["phase_seconds"] + position] = 1 / 3
            seen["runs"] += RUNS_WITH_LONG_NAMES
            yield


def read_locks(target: Target, seen: Seen) -> Generator[None]:
    """Try to lock the victim's records for reading, by process and by open file."""
    with Held(os.close, DESCRIPTORS) as held:
        while True:
            for path in _victim_paths(target):
                descriptor = held.hold(os.open(path, os.O_RDONLY))
                seen[_try_lock(descriptor, fcntl.F_SETLK)] += 1  # the process's
                seen[_try_lock(descriptor, fcntl.F_OFD_SETLK)] += 1  # the open file's
            yield


def broken(target: Target, seen: Seen) -> Generator[None]:
    """Write damaged and truncated records, some while they are read, and entries that are no files."""
    path = Path(target.run_dir, "shrinks.rank")
    with Held(_delete, first=[path, *_oddities(target, seen)]), Held(_delete, DAMAGED) as present:
        for made in count():
            data = _copy_of_victim(target)
            contents = damaged(1, made), damaged(2, made), data[: random.randrange(len(data) + 1)]
            for kind, content in enumerate(contents):
                present.hold(Path(target.run_dir, f"broken-{made}-{kind}.rank")).write_bytes(content)
                seen["damaged"] += 1
            path.write_bytes(data)  # truncates it first
            os.truncate(path, (made + 1) % layout.SIZE)
            seen["truncated"] += 1
            yield


def closed_directory(target: Target, seen: Seen) -> Generator[None]:
    """Make a run directory that can be listed but not entered, and sometimes the reverse."""
    directory = Path(target.closed_dir)
    for number in range(100):
        (directory / f"{number}.rank").touch()
    try:
        for turn in count():
            mode = (0o744, 0o744, 0o744, 0o755, 0o711, 0o700)[turn % 6]
            directory.chmod(mode)
            seen[f"mode {mode:o}"] += 1
            yield
    finally:
        directory.chmod(0o755)


def _try_lock(descriptor: int, lock: int) -> str:
    try:
        fcntl.fcntl(descriptor, lock, READ_LOCK)
    except OSError as error:
        return f"refused: {errno.errorcode[error.errno or 0]}"
    return "locked"


def _labels(target: Target) -> dict[str, Any]:
    """Return the labels of the victim's rank 0, which every user can read."""
    for path in _victim_paths(target):
        with suppress(FileNotFoundError, UnreadableRecordError):
            return dict(read_rank(path).info) | {"rank": "0"}
    return {**dict.fromkeys(LABELS, ""), "run": RUN, "rank": "0", "pid": "1", "phases": []}


def _victim_paths(target: Target) -> list[Path]:
    names = (name for name in os.listdir(target.run_dir) if RUN in name)  # noqa: PTH208 - thousands, as text
    paths = (Path(target.run_dir, name) for name in names)
    return [path for path in paths if path.is_file() and path.lstat().st_uid == VICTIM]


def _copy_of_victim(target: Target) -> bytes:
    paths = _victim_paths(target)
    return paths[0].read_bytes() if paths else bytes(layout.SIZE)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def _publish(target: Target, name: str, now: float | None = None, **labels: Any) -> RankWriter:
    age = 60.0 if now is None else time.time() - now
    slots = {"started_monotonic": time.monotonic() - age, "started_unix": time.time() - age, "steps": 1e6}
    return publish(Path(target.run_dir), name, slots, **_labels(target) | labels)[0]


def _remove(writer: RankWriter) -> None:
    assert writer.path is not None
    _delete(writer.path)
    writer.detach()


def _oddities(target: Target, seen: Seen) -> Iterator[Path]:
    victims = _victim_paths(target)
    directory, victim = Path(target.run_dir), victims[0] if victims else Path("/dev/zero")
    makers: dict[str, Callable[[Path], object]] = {
        "pipe.rank": os.mkfifo,
        "directory.rank": os.mkdir,
        "link.rank": lambda path: path.symlink_to(victim),
        "zeros.rank": lambda path: path.symlink_to("/dev/zero"),
        "loop.rank": lambda path: path.symlink_to(path),
        "hard.rank": lambda path: path.hardlink_to(victim),
        "line\nend\x1b[2J.rank": lambda path: path.touch(),
        os.fsdecode(b"\xff\xfe.rank"): lambda path: path.touch(),
    }
    for name, make in makers.items():
        try:
            make(directory / name)
            seen["oddities"] += 1
        except OSError:  # a hard link to another user's file, mostly
            seen["oddities refused"] += 1
        yield directory / name


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
