"""The messages in the kernel's log.

They are read from /dev/kmsg, else with syslog(2), for a container without that file. Both need CAP_SYSLOG unless
kernel.dmesg_restrict is 0.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

KMSG = Path("/dev/kmsg")
SECONDS = 5.0
READ_BYTES = 64 * 2**20
"""The most bytes that are read. The kernel's buffer usually has 1 MiB or less."""
RECORD = 16 * 1024
READ_ALL, BUFFER_SIZE = 3, 10
"""Actions of syslog(2)."""


class Message(NamedTuple):
    """A message of the kernel."""

    at: float
    """Seconds of the kernel's clock, which is about the time since boot without suspends."""
    text: str


def read_messages(path: Path = KMSG) -> list[Message]:
    """Return all messages, the oldest first, in at most 5 s. Raise OSError if that is not permitted."""
    try:
        return [*_parse_kmsg(_records(path))]
    except OSError:
        texts = _syslog()
        if texts is None:
            raise
        return [*_parse_syslog(texts)]


def _records(path: Path) -> Iterator[str]:
    """Yield the lines of /dev/kmsg that are there now. Raise OSError if it cannot be opened."""
    deadline, left, rest = time.monotonic() + SECONDS, READ_BYTES, b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while left > 0 and time.monotonic() < deadline:
            try:
                data = os.read(descriptor, RECORD)  # one message
            except BlockingIOError:
                break
            except BrokenPipeError:  # messages were overwritten; the next one is read
                continue
            if not data:
                break
            left -= len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    finally:
        os.close(descriptor)


def _parse_kmsg(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the kernel's own messages: `6,339,5140900,-;text`. Other facilities than 0 are of user processes."""
    for line in lines:
        prefix, separator, text = line.partition(";")
        priority, _, at, *_ = [*prefix.split(","), "", ""]
        if separator and priority.isdecimal() and at.isdecimal() and int(priority) < 8:
            yield Message(int(at) / 1e6, text)


def _syslog() -> str | None:
    """Return the kernel's buffer by syslog(2); None if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = libc.klogctl(BUFFER_SIZE, None, 0)
    if size <= 0:
        return None
    buffer = ctypes.create_string_buffer(min(size, READ_BYTES))
    length = libc.klogctl(READ_ALL, buffer, len(buffer))
    return None if length < 0 else buffer.raw[:length].decode(errors="replace")


def _parse_syslog(text: str) -> Iterator[Message]:
    """Yield the messages of syslog(2): `<6>[    5.140900] text`."""
    for line in text.splitlines():
        if match := re.match(r"<([0-7])>\[ *(\d{1,12}\.\d+)\](?:\[ *[TC]\d+\])? (.*)", line):
            yield Message(float(match[2]), match[3])
