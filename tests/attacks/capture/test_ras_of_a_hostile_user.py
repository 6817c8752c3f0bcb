"""The attack: a user binds NCCL's port before a job of another user, to forge its capture or to delay it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.capture import ras
from rankscope_exporter.capture.ras import read_ras
from rankscope_exporter.capture.ras_answer import LINES_LIMIT, describe_answer
from rankscope_exporter.capture.source import UnavailableError

LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))  # after the imports: the interpreter may be in a home directory
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    for answer in (b"SERVER PROTOCOL 2\\n", b"OK\\n", b"forged " * 100_000):
        connection.recv(100)
        connection.sendall(answer)
    connection.close()
"""
CPU_SECONDS = 5.0
"""Ten times what the worst of these answers takes on a slow machine."""


@contextmanager
def listening(user: int, port: int = 0) -> Iterator[tuple[int, int]]:
    """Run a process of a user that answers on a port. Yield its process ID and the port."""
    command = [sys.executable, "-c", LISTEN, str(port), str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        yield process.pid, int(process.stdout.readline() or 0)
        process.kill()


@needs_root
def test_another_users_listener_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(MALLORY) as (hostile, port), listening(VICTIM, port) as (job, taken):
        assert not taken, "the kernel shares a port only among sockets of one user"
        monkeypatch.setattr(ras, "PORT", port)
        with pytest.raises(UnavailableError, match="no process of the run listens"):
            read_ras([job, os.getpid()])
        assert "forged" in read_ras([hostile])


ANSWERS = {
    "many findings": ["#0-0 (ab) INCOMPLETE", "  Missing communicator data from 1 rank"] * 100_000,
    "many states": ["#0-0 (ab) MISMATCH", *(f"  Rank {number} has status A" for number in range(200_000))],
    "many ranks": ["#0-0 (ab) MISMATCH", "  2 ranks have status A", *["  Rank 1 -- "] * 200_000],
    "a long list": [
        "#0-0 (ab) INCOMPLETE",
        "  Missing communicator data from 9 ranks",
        "  The missing ranks: " + "1," * 10**5,
    ],
    "spaces": [" " * 250_000],
    "numbers": ["1 " * 120_000],
    "large numbers": ["#0-0 (ab) MISMATCH", "  Rank 99999999999999999999 has launched up to operation " + "9" * 5000],
    "places": ["#0-0 (ab) MISMATCH", "  Rank 1 -- " + "managed by process 1 on node a" * 5000],
    "many processes": ["DEAD", *["  Process 1 on node a managing GPU 1"] * 200_000],
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_reading_a_hostile_answer_takes_little_time(kind: str) -> None:
    began = time.process_time()
    assert len([*describe_answer(ANSWERS[kind])]) <= LINES_LIMIT + 2
    assert time.process_time() - began < CPU_SECONDS
