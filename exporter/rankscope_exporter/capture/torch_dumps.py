"""The dumps of torch's flight recorder that a run's ranks have written on this node, and what they say.

torch writes a rank's dump when NCCL's watchdog times out, ten minutes after the ranks stopped by default, and ends the
process. So the places are looked up while the processes live, and the dumps are copied again afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankscope.cli.printable import printable
from rankscope.record.process_stat import PROCFS, TICKS, is_running, read_environment, read_process_stat, read_user_ids
from rankscope_exporter.capture.child import run_child, serve
from rankscope_exporter.capture.rooted import read_file
from rankscope_exporter.capture.source import PERMISSION, UnavailableError, cut
from rankscope_exporter.hangs.command import explain_dumps
from rankscope_exporter.hangs.flight_recorder import DumpError
from rankscope_exporter.hangs.records import describe_dumps, dump_prefixes

DUMP_BYTES = 16 * 2**20
"""The size limit of a dump. 2,000 operations with their stacks take 10 MB at most."""
BYTES = 64 * 2**20
"""The size limit of all dumps of a capture."""
TEXT_BYTES = 64 * 1024
CLOCK_STEP = 1.0
"""Seconds by which a file system's time may be before the kernel's."""
LINE_LIMIT = 1000


class Place(NamedTuple):
    """The place of a rank's dump. Nothing else of its process's environment is kept."""

    rank: int
    pid: int
    start: int
    """In clock ticks since boot."""
    prefixes: Sequence[str]
    """What torch puts before the rank's number, in the process's own file system; the first one that exists counts."""
    users: Sequence[int]
    """The process's user IDs."""
    is_in_container: bool
    """True if its file system is not the exporter's: after its end, it cannot be read."""
    setting: str
    """What the process's settings mean for its dumps, in one line."""


def locate_dumps(pids: Mapping[int, int], procfs: Path = PROCFS) -> list[Place]:
    """Return the places of the living ranks whose environment may be read.

    `pids` are their processes by rank. It does not block: it reads only procfs.
    """
    places = []
    for rank, pid in pids.items():
        with suppress(OSError):
            places.append(_locate(rank, pid, procfs))
    return places


def _locate(rank: int, pid: int, procfs: Path) -> Place:
    process = procfs / str(pid)
    environment, directory = read_environment(pid, procfs), (process / "cwd").readlink()
    is_same_view = (process / "ns/mnt").stat().st_ino == (procfs / "self/ns/mnt").stat().st_ino
    return Place(
        rank,
        pid,
        read_process_stat(pid, procfs).start,
        dump_prefixes(environment, directory),
        sorted(set(read_user_ids(pid, procfs))),
        not is_same_view or str((process / "root").readlink()) != "/",
        next(describe_dumps(environment, directory), "").partition(" Then run:")[0],
    )


def copy_dumps(places: Sequence[Place], folder: Path, kept_bytes: int = BYTES) -> str:
    """Copy the dumps into a folder that has nothing else, and return what they say. Raise UnavailableError.

    It replaces those of an earlier copy, and takes at most 20 s, 16 MiB for a dump, 64 MiB for all, and 64 KiB of text.
    All are read; of the copies, the smallest that fit into `kept_bytes` are kept. A dump is a regular file of the
    process's user, no link, and newer than the process. A child process reads them.
    """
    if not places:
        raise UnavailableError(f"the exporter may not see where torch writes dumps: {PERMISSION}")
    return run_child(__name__, [place._asdict() for place in places], str(folder), kept_bytes)


def _copy(places: Iterable[Mapping[str, object]], folder: str, kept_bytes: int) -> str:
    """Do the work of `copy_dumps`, in the child."""
    known = [Place(**one) for one in places]  # type: ignore[arg-type]
    left, lines = BYTES, []
    for place in known:
        size, problem = _copy_dump(place, Path(folder), min(left, DUMP_BYTES))
        left -= size
        lines += [problem] if problem else []
    if left == BYTES:
        reason = " ".join([*lines, "torch has written no dump yet.", known[0].setting])
        raise UnavailableError(printable(reason.rstrip("."), LINE_LIMIT))
    lines = [*_explain(Path(folder)), *lines, *_remove_large(Path(folder), kept_bytes)]
    return cut("\n".join(printable(line, LINE_LIMIT) for line in lines), TEXT_BYTES)


def _remove_large(folder: Path, kept_bytes: int) -> Iterator[str]:
    """Remove the largest dumps until the others fit. Yield their number."""
    sizes = sorted((path.stat().st_size, path) for path in folder.iterdir())
    number = 0
    while sizes and sum(size for size, _ in sizes) > kept_bytes:
        sizes.pop()[1].unlink()
        number += 1
    if number:
        yield f"{number} dumps were read and are not kept: all together, they have more than {kept_bytes} bytes."


def _copy_dump(place: Place, folder: Path, limit: int) -> tuple[int, str]:
    """Return the number of bytes that were copied, and what is wrong with a dump that exists."""
    try:
        data = _read(place, limit)
        _write(folder, f"nccl_trace_rank_{place.rank}", data)
    except FileNotFoundError:
        return 0, ""
    except OSError as error:
        return 0, f"Rank {place.rank}: its dump is not copied: {error.strerror}."
    return len(data), ""


def _explain(folder: Path) -> Iterator[str]:
    try:
        yield from explain_dumps(folder)
    except DumpError as error:
        yield f"{error}."


def _read(place: Place, limit: int) -> bytes:
    """Return a rank's dump. Raise FileNotFoundError if its process has written none, or another OSError."""
    is_alive = is_running(place.pid, place.start)
    if place.is_in_container and not is_alive:
        raise OSError(0, "the process has ended, and its container's files cannot be read")
    root = PROCFS / str(place.pid) / "root" if is_alive else Path("/")
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + place.start / TICKS
    for prefix in place.prefixes:
        with suppress(FileNotFoundError):
            data, changed = read_file(root, f"{prefix}{place.rank}", {*place.users}, limit)
            if changed >= began - CLOCK_STEP:
                return data
    raise FileNotFoundError


def _write(folder: Path, name: str, data: bytes) -> None:
    """Write or replace a file at once, without following a link."""
    part = folder / f"{name}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:  # noqa: PTH123
        file.write(data)
    part.rename(folder / name)


if __name__ == "__main__":
    serve(_copy)
