"""NCCL's RAS in a capture: whose answer counts, what it says, and that no server delays or fills a capture."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testing.servers import free_port
from tests.attacks.users import VICTIM, needs_root
from tests.exporter.capture import ras_server
from tests.exporter.capture.ras_server import HEAD_24, HEAD_28, HEALTHY, Serve, listen, ras, serving

from rankscope_exporter.capture import ras as module
from rankscope_exporter.capture.ras import read_ras
from rankscope_exporter.capture.ras_answer import LINES_LIMIT, describe_answer
from rankscope_exporter.capture.source import UnavailableError

OWN = [os.getpid()]


@contextmanager
def own_server(serve: Serve, monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve in this process, on a free port as NCCL's."""
    with serving(serve, host=host) as port:
        monkeypatch.setattr(module, "PORT", port)
        yield port


@contextmanager
def other_process(port: int = 0, *before: str) -> Iterator[tuple[int, int]]:
    """Serve in another process of this user. Yield its port and process ID."""
    command = [*before, sys.executable, "-m", ras_server.__name__, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        chosen, pid = map(int, process.stdout.readline().split())
        yield chosen, pid
        assert process.stdin
        process.stdin.close()


READINGS = {
    "healthy_2_24": (HEAD_24 + HEALTHY, ["NCCL's RAS reports no error in 8 communicators."]),
    "stopped_2_24": (
        HEAD_24 + ras_server.STOPPED_24,
        [
            "Process 3487984 on node 172.16.64.213 managing GPU 5 does not answer RAS.",
            "Rank 21 of communicator #0-0 (32 ranks) is missing: no data about it.",
        ],
    ),
    "dead_2_28": (
        HEAD_28 + ras_server.DEAD_28,
        [
            "Process 3487984 on node 172.16.64.213 managing GPU 5 is dead for RAS: it cannot be reached.",
            "Rank 21 of communicator #0-0 (32 ranks) (process 3487984 on node 172.16.64.213) is missing: no data "
            "about it.",
        ],
    ),
    "behind_2_24": (
        HEAD_24 + ras_server.BEHIND_24,
        ["Ranks 2,7 of communicator #0-0 (32 ranks) are behind: launched 6649 of 6650 (collective)."],
    ),
    "behind_2_28": (
        HEAD_28 + ras_server.BEHIND_28,
        [
            "Rank 1 of communicator #0-0 (2 ranks) (process 12 on node 10.0.0.1) reported Remote process error.",
            "Rank 0 of communicator #0-0 (2 ranks) (process 11 on node 10.0.0.1) has status RUNNING, most have status "
            "FINALIZE.",
            "Rank 1 of communicator #0-0 (2 ranks) (process 12 on node 10.0.0.1) is behind: launched 39 of 40 "
            "(AllReduce).",
            "Rank 1 of communicator #0-0 (2 ranks) (process 12 on node 10.0.0.1) is behind: launched none of 2 "
            "(Broadcast).",
        ],
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_the_reading_names_who_is_dead_missing_failing_or_behind(name, monkeypatch) -> None:
    answer, expected = READINGS[name]
    with own_server(ras(answer), monkeypatch):
        found = read_ras(OWN)
    reading, _, rest = found.partition("\n\n")
    assert reading.splitlines() == expected
    assert rest == f"Answer of NCCL's RAS in process {OWN[0]}:\n\n{answer}"


def test_of_many_ranks_behind_those_ahead_are_named() -> None:
    counts = "  Communicator ranks have different AllReduce operation counts\n"
    ahead = "  Rank 3 has launched up to operation 9 -- GPU 3 managed by process 4 on node 10.0.0.1\n"
    behind = f"#0-1 (ab) MISMATCH\n{counts}  6 ranks have launched up to operation 8\n{ahead}\n"
    *_, last = describe_answer((HEAD_28 + behind).splitlines())
    assert last == (
        "6 ranks of communicator #0-1 are behind: launched 8 of 9 (AllReduce); "
        "Rank 3 of communicator #0-1 (process 4 on node 10.0.0.1) is ahead."
    )


def test_a_reading_has_a_limited_number_of_lines() -> None:
    blocks = "".join(f"#0-{n} (ab) INCOMPLETE\n  Missing communicator data from 2 ranks\n\n" for n in range(500))
    *_, last = found = [*describe_answer((HEAD_28 + HEALTHY + blocks).splitlines())]
    assert len(found) == LINES_LIMIT + 1
    assert last == f"{500 - LINES_LIMIT} more lines are in the answer below."


def test_ras_may_listen_on_the_ipv6_loopback(monkeypatch) -> None:
    with own_server(ras(HEAD_28 + HEALTHY), monkeypatch, host="::1"):
        assert "no error" in read_ras(OWN)


def test_an_answer_of_another_process_does_not_count(monkeypatch) -> None:
    with other_process() as (port, pid):
        monkeypatch.setattr(module, "PORT", port)
        with pytest.raises(UnavailableError, match="no process of the run listens"):
            read_ras(OWN)
        assert "no error" in read_ras([pid])


def test_of_two_runs_of_a_user_that_share_the_port_the_own_one_answers(monkeypatch) -> None:
    with own_server(ras(HEAD_24 + ras_server.BEHIND_24), monkeypatch) as port, other_process(port) as (_, pid):
        monkeypatch.setattr(module, "ATTEMPTS", 64)  # the kernel chooses at random
        for _ in range(10):
            assert "are behind" in read_ras(OWN)
            assert "no error" in read_ras([pid])


def test_the_port_that_the_job_has_chosen_is_asked_and_no_other(monkeypatch) -> None:
    port, asked = free_port(), threading.Event()
    monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{port}")
    with serving(lambda _: asked.set()), other_process(port) as (_, pid):
        assert "no error" in read_ras([pid])
        with pytest.raises(UnavailableError, match="no process of the run listens"):
            read_ras(OWN)
    assert not asked.is_set()


@needs_root
def test_a_run_in_another_network_namespace_is_asked_there(monkeypatch) -> None:
    before = Path("/proc/self/ns/net").readlink()
    start = 'ip link set lo up && exec "$@"'
    with other_process(0, "unshare", "--net", "sh", "-c", start, "sh") as (port, pid):
        monkeypatch.setattr(module, "PORT", port)
        assert f"in process {pid}" in read_ras([pid])
    assert {task.joinpath("ns/net").readlink() for task in Path("/proc/self/task").iterdir()} == {before}


@needs_root
def test_a_process_whose_descriptors_are_hidden_is_not_asked() -> None:
    user = multiprocessing.get_context("fork").Pool(1, os.setuid, [VICTIM])
    with user as exporter, pytest.raises(UnavailableError, match="CAP_SYS_PTRACE"):
        exporter.apply(read_ras, [OWN])


def garbage(connection) -> None:
    connection.sendall(os.urandom(4096))


def garbage_later(connection) -> None:
    ras(os.urandom(200_000).decode("latin-1"))(connection)


def silent(connection) -> None:
    connection.recv(100)
    connection.recv(100)


def greet(connection) -> None:
    """Answer the hello and TIMEOUT."""
    for answer in (b"SERVER PROTOCOL 2\n", b"OK\n"):
        connection.recv(100)
        connection.sendall(answer)


def endless(connection) -> None:
    greet(connection)
    while True:
        connection.sendall(b"#0-0 (ab) INCOMPLETE\n  Missing communicator data from 1 rank\n" * 1000)


def endless_hello(connection) -> None:
    while True:
        connection.sendall(b"SERVER PROTOCOL " * 100)


def drips(connection) -> None:
    greet(connection)
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


def closes(connection) -> None:
    greet(connection)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (garbage, "is not NCCL's RAS"),
        (silent, "no answer within"),
        (endless_hello, "is not NCCL's RAS"),
        (closes, "does not answer|pipe|reset"),
        (ras(""), "does not answer"),
    ],
)
def test_a_server_that_does_not_answer_is_named_as_the_reason(serve, reason, monkeypatch) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2 if serve is silent else 30.0)
    with own_server(serve, monkeypatch), pytest.raises(UnavailableError, match=reason):
        read_ras(OWN)


@pytest.mark.parametrize(
    ("serve", "note"),
    [
        (endless, "The answer is cut off: it is longer than 256 KiB."),
        (drips, "The answer is cut off: the time is over."),
        (ras(HEAD_28 + HEALTHY, pause=30.0), "The answer is cut off: the time is over."),
        (garbage_later, "NCCL's RAS names no communicator."),
    ],
)
def test_a_server_that_does_not_end_is_cut_off(serve, note, monkeypatch) -> None:
    with own_server(serve, monkeypatch):
        found = read_ras(OWN, seconds=2.0)
    assert note in found
    assert len(found.encode()) <= module.BYTES
    assert found.replace("\n", "").isprintable()


def test_a_stopped_process_that_shares_the_port_is_passed_over(monkeypatch) -> None:
    with own_server(ras(HEAD_28 + HEALTHY), monkeypatch) as port, listen(port):  # of this process, and never accepts
        monkeypatch.setattr(module, "HELLO_SECONDS", 0.05)
        monkeypatch.setattr(module, "ATTEMPTS", 64)
        assert "no error" in read_ras(OWN)
