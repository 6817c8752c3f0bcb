"""The answer of NCCL's RAS about a run's communicators, as evidence: NCCL knows of processes on other nodes.

Each NCCL process (2.24 and later) listens on `localhost:28028`; the protocol is NCCL's src/ras/client_support.cc. All
processes of a user share the port (SO_REUSEPORT), also those of the user's other runs, and any user may bind it first.
So an answer counts only if the socket that gives it belongs to a rank's process. NCCL's RAS is a thread of its own,
which answers while the collectives hang.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rankscope.cli.explaining.fetching import within
from rankscope.cli.printable import printable
from rankscope.record.process_stat import read_environment
from rankscope_exporter.capture.ras_answer import describe_answer
from rankscope_exporter.capture.sockets import PROCFS, Address, find_owners, plain_host, read_sockets
from rankscope_exporter.capture.source import UnavailableError, cut

PORT = 28028
CHOSEN, CHOSEN_PORT = "NCCL_RAS_ADDR", re.compile(r".*:(\d{1,5})", re.DOTALL)
"""Another port, in the environment of a process. Nothing else of it is used."""
HELLO = b"CLIENT PROTOCOL 2\n"
"""The version of all NCCL releases from 2.24 to 2.30."""
GREETING = b"SERVER PROTOCOL "
PEERS_TIMEOUT = 5
"""Seconds that RAS waits for other processes, NCCL's default. Their answers may take twice as long."""
SECONDS = 20.0
"""The longest time of a reading."""
HELLO_SECONDS = 1.0
"""The longest time until RAS answers, as in NCCL's client. A stopped process accepts no connection."""
ATTEMPTS = 8
"""Connections until one reaches a process of the run: the kernel chooses among those that share the port."""
BYTES = 256 * 1024
"""The size limit of an answer. A communicator of 1,024 ranks with a line for each has 90 KiB."""
LINE_BYTES = 1024
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


class _NoAnswerError(Exception):
    """A connection has no answer. The message names the reason."""


def read_ras(pids: Collection[int], *, seconds: float = SECONDS, procfs: Path = PROCFS) -> str:
    """Return RAS' answer after a reading of it, in at most 20 s and 256 KiB. Raise UnavailableError.

    `pids` are the processes of the run's ranks on this node. The exporter must be allowed to see their file
    descriptors, and to enter their network namespace if it is another one.
    """
    deadline = time.monotonic() + seconds
    owners = find_owners(pids, procfs)
    reason = "no process of the run listens for clients of RAS: NCCL does since 2.24, unless NCCL_RAS_ENABLE=0"
    for pid in _one_of_each_namespace(pids, procfs):
        for address in _addresses(pid, owners, procfs):
            client = _Client(address, pid, pids, deadline, procfs)
            try:
                return _in_namespace(pid, client.ask, procfs)
            except (_NoAnswerError, OSError) as error:
                reason = f"{address.host}, port {address.port}: {error}"
    raise UnavailableError(reason)


def _one_of_each_namespace(pids: Collection[int], procfs: Path) -> Iterator[int]:
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            namespace = (procfs / str(pid) / "ns/net").stat().st_ino
            if namespace not in found:
                found.add(namespace)
                yield pid


def _addresses(pid: int, owners: Mapping[int, int], procfs: Path) -> Collection[Address]:
    """Return where the run's processes listen for RAS clients, in a process's network namespace.

    No other socket is contacted: the job may not expect it.
    """
    port = _port(pid, procfs)
    return {one.local for one in read_sockets(pid, procfs=procfs) if one.inode in owners and one.local.port == port}


def _port(pid: int, procfs: Path) -> int:
    """Return the port that a process has chosen, else the usual one."""
    chosen = ""
    with suppress(OSError):
        chosen = read_environment(pid, procfs).get(CHOSEN, "")
    match = CHOSEN_PORT.fullmatch(chosen)
    return int(match[1]) if match else PORT


def _in_namespace(pid: int, ask: Callable[[], str], procfs: Path) -> str:
    """Call a function on a new thread that has entered the network namespace of a process. Other threads stay."""

    def run() -> str:
        _enter(procfs / str(pid) / "ns/net")
        return ask()

    return within(2 * SECONDS, run)  # the client has a deadline of its own


def _enter(namespace: Path) -> None:
    """Move this thread to a network namespace, unless it is there already. Raise UnavailableError."""
    with namespace.open("rb") as file:
        if os.path.samestat(os.fstat(file.fileno()), Path("/proc/thread-self/ns/net").stat()):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), NEW_NETWORK) != 0:
            error = os.strerror(ctypes.get_errno())
            raise UnavailableError(
                f"the run has a network namespace of its own, and the exporter may not enter it without CAP_SYS_ADMIN "
                f"({error})"
            )


class _Client:
    """A client of RAS at one address."""

    def __init__(self, address: Address, pid: int, pids: Collection[int], deadline: float, procfs: Path) -> None:
        self._address, self._pid, self._pids, self._procfs = address, pid, pids, procfs
        self._deadline = deadline

    def ask(self) -> str:
        """Return the answer of a process of the run. Raise _NoAnswerError."""
        reason = f"no answer within {HELLO_SECONDS:g} s"
        for _ in range(ATTEMPTS):
            if time.monotonic() >= self._deadline:
                break
            try:
                with self._connect() as connection:
                    return self._converse(connection)
            except TimeoutError:
                reason = f"no answer within {HELLO_SECONDS:g} s"
            except (_NoAnswerError, OSError) as error:
                reason = str(error)
        raise _NoAnswerError(reason)

    def _connect(self) -> socket.socket:
        host, port = self._address
        target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        return socket.create_connection((target, port), timeout=HELLO_SECONDS)

    def _converse(self, connection: socket.socket) -> str:
        connection.sendall(HELLO)
        if not self._read_line(connection).startswith(GREETING):
            raise _NoAnswerError("what listens there is not NCCL's RAS")
        owner = self._find_peer(connection)
        connection.sendall(f"TIMEOUT {PEERS_TIMEOUT}\n".encode())
        if self._read_line(connection).strip() != b"OK":
            raise _NoAnswerError("RAS refuses the command TIMEOUT")
        connection.sendall(b"VERBOSE STATUS\n")
        data, end = self._read_rest(connection)
        if not data:
            raise _NoAnswerError(f"RAS has accepted the connection, and does not answer: {end}")
        lines = [printable(line.rstrip("\r"), LINE_BYTES) for line in data.decode(errors="replace").split("\n")]
        reading = [*describe_answer(lines), *([f"The answer is cut off: {end}."] if end else [])]
        return cut("\n".join([*reading, "", f"Answer of NCCL's RAS in process {owner}:", "", *lines]), BYTES)

    def _find_peer(self, connection: socket.socket) -> int:
        """Return the process of the run that has accepted a connection. Raise _NoAnswerError if it is another one."""
        host, port = connection.getsockname()[:2]
        remote = Address(plain_host(host), port)
        owners = find_owners(self._pids, self._procfs)
        for one in read_sockets(self._pid, self._address.port, self._procfs):
            if one.remote == remote and one.inode in owners:
                return owners[one.inode]
        raise _NoAnswerError("a process that is not one of the run's ranks answers")

    def _read_line(self, connection: socket.socket) -> bytes:
        data, until = b"", min(time.monotonic() + HELLO_SECONDS, self._deadline)
        while not data.endswith(b"\n"):
            received = _receive(connection, until, 1)  # a lying server sends more, which is read as its answer
            data += received
            if not received or len(data) > LINE_BYTES:
                raise _NoAnswerError("what listens there is not NCCL's RAS")
        return data

    def _read_rest(self, connection: socket.socket) -> tuple[bytes, str]:
        """Return an answer, and the reason if it is cut off."""
        data, end = bytearray(), f"it is longer than {BYTES // 1024} KiB"
        try:
            while len(data) < BYTES:
                if not (received := _receive(connection, self._deadline, BYTES - len(data))):
                    end = ""
                    break
                data += received
        except TimeoutError:
            end = "the time is over"
        except OSError as error:
            end = os.strerror(error.errno or 0)
        return bytes(data), end


def _receive(connection: socket.socket, until: float, size: int) -> bytes:
    left = until - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    connection.settimeout(left)
    return connection.recv(min(size, 65536))
