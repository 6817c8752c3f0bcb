"""Files as a process sees them, such as those of a container: its links lead to its own files, never to the exporter's.

A kernel from 5.6 on can do this (openat2 with RESOLVE_IN_ROOT); older ones are in use.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path

LINKS_LIMIT = 40
"""The most links in a path, as in the kernel."""


def read_file(root: Path, path: str, owners: Set[int], limit: int) -> tuple[bytes, float]:
    """Return the content of a regular file of one of these users, and its time of change in unix seconds.

    `path` is absolute, below `root`. Raise OSError, also if the file is a link or longer than `limit` bytes. A pipe or
    a device is not opened.
    """
    with ExitStack() as stack:
        descriptor = _find(root, path, stack)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if status.st_uid not in owners:
            raise OSError(0, "belongs to another user")
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            data = bytearray()
            while part := file.read(min(limit + 1 - len(data), 2**20)):
                data += part
        if len(data) > limit:
            raise OSError(0, f"longer than {limit // 2**20} MiB")
        return bytes(data), status.st_mtime


def _find(root: Path, path: str, stack: ExitStack) -> int:
    """Return a descriptor of a file that is not opened: only its place is known, as with O_PATH."""
    directories = [_open(str(root), None, stack, os.O_DIRECTORY)]
    parts = _parts(path)
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            directories = directories[:-1] or directories
            continue
        found = _open(part, directories[-1], stack, os.O_NOFOLLOW)
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            directories.append(found)
            continue
        target, links = os.readlink("", dir_fd=found), links + 1
        if not parts or links > LINKS_LIMIT:
            raise OSError(0, "is a link")
        directories = directories[:1] if target.startswith("/") else directories
        parts += _parts(target)
    return directories[-1]


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _open(name: str, directory: int | None, stack: ExitStack, flags: int) -> int:
    descriptor = os.open(name, os.O_PATH | os.O_CLOEXEC | flags, dir_fd=directory)
    stack.callback(os.close, descriptor)
    return descriptor
