"""The TCP sockets of processes, from /proc/PID/net and /proc/PID/fd. Neither reads a process's memory or stops it."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rankscope_exporter.capture.source import PERMISSION, UnavailableError

PROCFS = Path("/proc")
LISTENING = "0A"
"""The state TCP_LISTEN in /proc/net/tcp."""
SOCKETS_LIMIT = 100_000
"""The most sockets of a network namespace that are read. The kernel lists those that listen first."""
DESCRIPTORS_LIMIT = 262_144
"""The most file descriptors of all processes that are read, which takes a second. Each may have the same share."""
WORD = 8
"""Characters of a 32-bit word of an address."""


class Address(NamedTuple):
    """An IP address, and a TCP port. An IPv4 address in IPv6 form is an IPv4 address here."""

    host: str
    port: int


class Socket(NamedTuple):
    """A TCP socket. Its inode is 0 until its process has accepted the connection."""

    local: Address
    remote: Address
    inode: int


def find_owners(pids: Collection[int], procfs: Path = PROCFS) -> Mapping[int, int]:
    """Return the process of each socket by the socket's inode. Raise UnavailableError if they may not be read."""
    share = DESCRIPTORS_LIMIT // max(len(pids), 1)
    found = {pid: _inodes(procfs / str(pid) / "fd", share) for pid in pids}
    owners = {inode: pid for pid, inodes in found.items() for inode in inodes or ()}
    if not owners and None in found.values():
        raise UnavailableError(f"the exporter may not see which sockets belong to the run: {PERMISSION}")
    return owners


def _inodes(descriptors: Path, limit: int) -> set[int] | None:
    """Return the inodes of a process's sockets; None if they may not be read."""
    found = set()
    try:
        with os.scandir(descriptors) as entries:
            for entry in islice(entries, limit):
                with suppress(FileNotFoundError):  # it has just been closed
                    kind, _, inode = os.readlink(entry.path).partition(":")  # noqa: PTH115 - a Path takes longer
                    if kind == "socket":
                        found.add(int(inode.strip("[]")))
    except PermissionError:
        return None
    except OSError:  # it has ended
        return set()
    return found


def read_sockets(pid: int, port: int | None = None, procfs: Path = PROCFS) -> Iterator[Socket]:
    """Yield the TCP sockets of a process's network namespace that have a local port; without one, those that listen."""
    ending = "" if port is None else f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (procfs / str(pid) / "net" / name).open(errors="replace") as file:
            for line in islice(file, 1, SOCKETS_LIMIT):
                _, local, remote, state, *_, inode = line.split(None, 10)[:10]
                if local.endswith(ending) if ending else state == LISTENING:
                    yield Socket(parse_address(local), parse_address(remote), int(inode))


def parse_address(text: str) -> Address:
    """Return an address of /proc/net/tcp, whose words have this machine's byte order, such as `0100007F:6D7C`."""
    host, _, port = text.partition(":")
    words = (host[start : start + WORD] for start in range(0, len(host), WORD))
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return Address(plain_host(str(ipaddress.ip_address(packed))), int(port, 16))


def plain_host(host: str) -> str:
    """Return an IPv4 address in IPv6 form (`::ffff:127.0.0.1`) as such, and any other address as it is."""
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)
