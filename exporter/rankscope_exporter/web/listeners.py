"""Listening sockets: the kernel queues new connections by client address.

A client that opens connections faster than they are accepted fills its own queue, and other addresses still connect at
once. uvloop accepts one connection per socket in an iteration of the event loop: as many of one address as it serves.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import addressof, create_string_buffer
from typing import Any

from rankscope_exporter.web import limits

logger = logging.getLogger(__name__)

ATTACH_PROGRAM = 51  # SO_ATTACH_REUSEPORT_CBPF in asm-generic/socket.h, which Python does not define
LOAD_BYTE, LOAD, LOAD_X, STORE = 0x30, 0x20, 0x61, 0x02  # classic BPF, linux/bpf_common.h
XOR_X, MULTIPLY, SHIFT_RIGHT, MODULO = 0xAC, 0x24, 0x74, 0x94
JUMP_IF_EQUAL, JUMP, RETURN = 0x15, 0x05, 0x16
NETWORK = 0xFFF00000  # SKF_NET_OFF: offsets from here are into the IP header
ANY_IPV6 = "::"  # and any IPv4 address, as for programs in Go
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the address is not of this machine, or IPv6 is off

Address = tuple[Any, ...]  # host, port, and for IPv6 more


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Yield sockets that listen on the port, at each address of the host; without a host, at all addresses.

    Raises OSError, with the address as its filename. An address that this machine does not have is logged and left out,
    if the host has another one: /etc/hosts usually has ::1 for localhost, even where IPv6 is off.
    """
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        absent: list[OSError] = []
        addresses = _addresses(host, port)
        for family, address in addresses:
            if sockets:  # port 0 is a free port, the same one for each address
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets += opened.enter_context(_listening_at(family, address, len(addresses)))
            except OSError as error:
                named = OSError(error.errno, error.strerror, address_name(address))
                if error.errno not in ABSENT:
                    raise named from None
                absent.append(named)
        if not sockets:
            raise absent[0]
        for other in absent:
            logger.warning("not listening on %s: %s", other.filename, other.strerror)
        yield sockets


def address_name(address: Address) -> str:
    """Return a socket's address as in a URL."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Address]]:
    if not host:
        dual = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, (ANY_IPV6, port)) if dual else (socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys((family, address) for family, _, _, _, address in found)]  # a name may have one twice


@contextmanager
def _listening_at(family: socket.AddressFamily, address: Address, addresses: int) -> Iterator[list[socket.socket]]:
    """Yield the sockets of one of so many addresses.

    The first socket is bound without SO_REUSEPORT, so that a port in use is an error.
    """
    with ExitStack() as opened:
        queues = max(1, limits.accept_queues() // addresses)
        first, *others = sockets = [opened.enter_context(_socket(family, address)) for _ in range(queues)]
        first.bind(address)
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _queue_by_address(first, queues)
        first.listen(limits.BACKLOG)
        for one in others:
            one.bind(first.getsockname())
            one.listen(limits.BACKLOG)
        yield sockets


def _socket(family: socket.AddressFamily, address: Address) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != ANY_IPV6)
    # Accepted sockets inherit both options. asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP. Without it,
    # a body waits for the delayed acknowledgment of its headers: 40 ms for each scrape on a persistent connection.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.SEND_BUFFER)
    return made


def _queue_by_address(first: socket.socket, queues: int) -> None:
    """Make the kernel choose the socket of a new connection by client address; by default it uses the port, too."""
    code = create_string_buffer(_program(queues))
    program = struct.pack("HxxxxxxP", len(code.raw) // 8, addressof(code))
    try:
        first.setsockopt(socket.SOL_SOCKET, ATTACH_PROGRAM, program)
    except OSError as error:
        logger.warning("cannot queue new connections by address: %s", error.strerror)


def _program(queues: int) -> bytes:
    """Return classic BPF that hashes a client's network as in `connections.client_network`."""
    instructions = (
        (LOAD_BYTE, 0, 0, NETWORK),
        (SHIFT_RIGHT, 0, 0, 4),  # the IP version
        (JUMP_IF_EQUAL, 4, 0, 6),
        (LOAD_BYTE, 0, 0, NETWORK + 12),
        (JUMP_IF_EQUAL, 7, 0, 127),
        (LOAD, 0, 0, NETWORK + 12),
        (JUMP, 0, 0, 5),
        (LOAD, 0, 0, NETWORK + 8),
        (STORE, 0, 0, 0),
        (LOAD_X, 0, 0, 0),
        (LOAD, 0, 0, NETWORK + 12),
        (XOR_X, 0, 0, 0),
        (MULTIPLY, 0, 0, secrets.randbits(32) | 1),  # random, so that no client can choose another's queue
        (SHIFT_RIGHT, 0, 0, 24),
        (MODULO, 0, 0, queues),
        (RETURN, 0, 0, 0),
    )
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
