"""The space on the file systems of a run: its working directories, /dev/shm and /tmp, as its processes see them.

A call about a network file system whose server is gone never returns. So a child process makes each one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rankscope_exporter.capture.child import run_child, serve
from rankscope_exporter.capture.source import UnavailableError, cut

PROCFS = Path("/proc")
SHARED = ("/dev/shm", "/tmp")  # noqa: S108 - measured, not used
OWN = PROCFS / "self"
SECONDS = 5.0
"""The longest time for one directory."""
DIRECTORIES_LIMIT = 4
BYTES = 16 * 1024
MOUNTS_BYTES = 2**20
GIBIBYTE = 2**30


def describe_disks(pids: Collection[int], procfs: Path = PROCFS) -> str:
    """Return a line for each directory: free and total bytes and files. Takes 20 s and 16 KiB at most.

    If no process's directories may be read, those of the exporter are shown.
    """
    found = [*_directories(pids, procfs)] or [(name, name, _file_system(OWN, name)) for name in SHARED]
    return cut("\n".join(_describe(*one) for one in found[:DIRECTORIES_LIMIT]), BYTES)


def _directories(pids: Collection[int], procfs: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the directories of processes as they see them, as the exporter does, and their file systems.

    Each is yielded once for each view of the file systems.
    """
    seen: set[tuple[int, str, str]] = set()
    for process in (procfs / str(pid) for pid in pids):
        with suppress(OSError):
            view = (process / "ns/mnt").stat().st_ino, str((process / "root").readlink())
            for name in (*SHARED, str((process / "cwd").readlink())):
                if (*view, name) not in seen:
                    seen.add((*view, name))
                    yield name, f"{process}/root{name}", _file_system(process, name)


def _file_system(process: Path, directory: str) -> str:
    """Return the kind and the source of a directory's file system, such as `nfs4 storage:/home`. It is not touched."""
    best, found = "", ""
    with suppress(OSError), (process / "mountinfo").open("rb") as file:
        for line in file.read(MOUNTS_BYTES).decode(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            place = before.split(" ")[4] if before.count(" ") >= 5 else ""
            is_above = place == "/" or directory == place or directory.startswith(f"{place}/")
            if place and is_above and len(place) >= len(best):
                best, found = place, " ".join(after.split(" ")[:2])
    return found


def _describe(name: str, path: str, file_system: str) -> str:
    title = f"{name} ({file_system})" if file_system else name
    try:
        return f"{title}: {run_child(__name__, path, seconds=SECONDS)}"
    except UnavailableError as error:
        return f"{title}: {error}"


def _space(path: str) -> str:
    """Return the free and total space, in the child."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise UnavailableError(error.strerror or "unknown error") from error
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    files = f"{found.f_favail} of {found.f_files} files" if found.f_files else "no limit of files"
    read_only = ", read-only" if found.f_flag & os.ST_RDONLY else ""
    return f"{free / GIBIBYTE:.2f} of {total / GIBIBYTE:.2f} GiB free, {files}{read_only}"


if __name__ == "__main__":
    serve(_space)
