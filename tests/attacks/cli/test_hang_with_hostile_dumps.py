"""The attack: a user who may write next to a job's dumps writes one that takes `rankscope hang` hours or gigabytes."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.users import MALLORY, needs_root
from tests.exporter.hangs.test_flight_recorder import Recorder, write

CPU_SECONDS = 120  # a hundred times what the worst of these dumps takes
MEMORY = 2**30  # bytes of address space
GROUP = ("0", "default_pg")
ENTRY = {"pg_id": 0, "process_group": GROUP, "profiling_name": "nccl:all_reduce", "state": "scheduled"}
MANY = 1_000_000


def nested() -> object:
    """Return lists that contain a list ten to the power of thirty times, in 300 bytes."""
    value: list[object] = []
    for _ in range(30):
        value = [value] * 10
    return value


def key(nesting: bytes) -> bytes:
    """Return a pickle of a dictionary whose key is a tuple: hashing it takes ages, or ends the process."""
    return pickle.PROTO + b"\4" + b"})" + nesting + b"Ns."


def repeated_entries() -> bytes:
    """Return a pickle with one entry a million times, each with a million tensors."""
    entry = {**ENTRY, "collective_seq_id": 1, "input_sizes": [[1]] * 10_000}
    return pickle.dumps({"entries": [entry] * MANY})


def large_group() -> bytes:
    ranks = {"0": {"desc": "default_pg", "ranks": [*range(MANY)]}}
    return pickle.dumps({"entries": [{**ENTRY, "collective_seq_id": 4}], "pg_config": ranks})


DUMPS: dict[str, Callable[[], bytes]] = {
    "lists in lists as entries": lambda: pickle.dumps({"entries": nested()}),
    "lists in lists as a name": lambda: pickle.dumps({"entries": [{**ENTRY, "process_group": nested()}]}),
    "lists in lists as ranks": lambda: pickle.dumps({"entries": [], "pg_config": {"0": {"ranks": nested()}}}),
    "lists in lists as sizes": lambda: pickle.dumps(
        {"entries": [{**ENTRY, "collective_seq_id": 1, "input_sizes": nested()}]}
    ),
    "tuples in tuples as a key": lambda: key((pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2) * 60),
    "a deep tuple as a key": lambda: key(pickle.TUPLE1 * MANY),
    "a large index": lambda: b"\x80\x04Nr\xff\xff\xff\x0f.",
    "a large length": lambda: b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    "one entry a million times": repeated_entries,
    "a group of a million ranks": large_group,
    "many empty dictionaries": lambda: b"\x80\x04(" + b"}" * (60 * 2**20) + b"l.",
    "many empty lists in JSON": lambda: b"[" + b"[]," * (20 * 2**20) + b"[]]",
    "nested brackets": lambda: b'{"entries":' + b"[" * 100_000,
    "a number of 5,000 digits": lambda: json.dumps({"entries": []}).encode()[:-2] + b"9" * 5000 + b"]}",
    "bytes that are no text": lambda: b'{"' + b"\xff" * 2**20,
}


def hang(dumps: Path) -> subprocess.CompletedProcess[str]:
    """Run `rankscope hang` with limits, at which the kernel ends it or refuses memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    command = [sys.executable, "-m", "rankscope.cli.launch", "hang", str(dumps)]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Return a directory with the dumps of four ranks, of which rank 1 is late."""
    recorders = [Recorder(rank) for rank in range(4)]
    for one in recorders:
        one.issue("default_pg")
        if one.rank != 1:
            one.issue("default_pg", completes=False)
    return write(tmp_path, recorders)


def test_without_an_attack_the_late_rank_is_named(dumps: Path) -> None:
    answer = hang(dumps)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("Rank 1 of 4 blocks the other ranks.")


@pytest.mark.parametrize("kind", DUMPS)
def test_a_hostile_dump_costs_only_its_rank(dumps: Path, kind: str) -> None:
    hostile = dumps / "nccl_trace_rank_3"
    hostile.write_bytes(DUMPS[kind]())
    answer = hang(dumps)
    assert (answer.returncode, answer.stderr) == (0, "")
    first, *_, last = answer.stdout.splitlines()
    assert first == "Rank 1 of 4 blocks the other ranks."
    assert last.startswith(f"{hostile}: ")
    assert last.endswith(". Its rank counts as missing.")
    assert len(last) < 400


@needs_root
def test_only_the_callers_own_dumps_are_compared(dumps: Path) -> None:
    forged, own = dumps / "nccl_trace_rank_4", dumps / "x_2"
    for path in (forged, own):
        path.write_bytes((dumps / "nccl_trace_rank_1").read_bytes())
        os.chown(path, MALLORY, MALLORY)
    answer = hang(dumps)
    assert answer.stdout.startswith("Rank 1 of 4 blocks the other ranks.")
    assert answer.stdout.count("belongs to another user") == 2
