"""`rankscope hang DIR`: the rank that blocks a run, from dumps of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from testing.torchrun import environment, torchrun

from rankscope_exporter.hangs import flight_recorder
from rankscope_exporter.hangs.command import explain_dumps, show
from rankscope_exporter.hangs.flight_recorder import DumpError

RANKS = 4
TENSOR = {0: ("5", [0, 1]), 1: ("5", [0, 1]), 2: ("6", [2, 3]), 3: ("6", [2, 3])}
PIPELINE = {0: ("7", [0, 2]), 1: ("8", [1, 3]), 2: ("7", [0, 2]), 3: ("8", [1, 3])}
WORLD = ("0", [0, 1, 2, 3])
Entry = dict[str, Any]


class Recorder:
    """The flight recorder of one rank with NCCL. Groups are numbered in the order of their creation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._groups = {"default_pg": WORLD, "TENSOR": TENSOR[rank], "PIPELINE": PIPELINE[rank]}
        self._counts = {name: [0, 0] for name in self._groups}
        self.entries: list[Entry] = []

    def issue(self, group: str, operation: str = "all_reduce", completes: bool = True, peer: int | None = None) -> None:
        """Issue one operation; its peer is a rank of the run."""
        name, ranks = self._groups[group]
        counts = self._counts[group]
        counts[0] += 1
        counts[1] += completes
        if peer is not None:
            arrow = "->" if operation == "send" else "<-"
            operation = f"{operation} {ranks.index(self.rank)}{arrow}{ranks.index(peer)}"
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": [*self._groups].index(group),
                "process_group": (name, group),
                "collective_seq_id": 0 if peer is not None else counts[0],
                "p2p_seq_id": counts[0] if peer is not None else 0,
                "profiling_name": f"nccl:{operation}",
                "state": "completed" if completes else "scheduled",
                "is_p2p": peer is not None,
            }
        )

    def document(self, *, only_pending: bool, has_status: bool) -> dict[str, Any]:
        """Return the dump. torch can leave out completed operations, and older versions have no status."""
        config = {name: {"name": name, "desc": group, "ranks": str(r)} for group, (name, r) in self._groups.items()}
        status = {
            str(number): {"last_enqueued_collective": issued, "last_completed_collective": completed}
            for number, (issued, completed) in enumerate(self._counts.values())
        }
        entries = [one for one in self.entries if not only_pending or one["state"] != "completed"]
        document = {"version": "2.9", "pg_config": config, "entries": entries}
        return document | ({"pg_status": status} if has_status else {})


@pytest.fixture(params=["pickle", "json"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(directory: Path, recorders: list[Recorder], form: str = "pickle", **how: bool) -> Path:
    for one in recorders:
        document = one.document(**{"only_pending": False, "has_status": True, **how})
        path = directory / f"nccl_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(document) if form == "pickle" else json.dumps(document).encode())
    return directory


def trained() -> list[Recorder]:
    """Return the recorders of ranks that have made some steps."""
    recorders = [Recorder(rank) for rank in range(RANKS)]
    for one in recorders:
        for _ in range(3):
            one.issue("TENSOR")
            one.issue("default_pg")
    return recorders


def first_line(directory: Path) -> str:
    return next(explain_dumps(directory))


HOW = [{"only_pending": True}, {"has_status": False}, {}]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_has_not_issued_a_collective_is_found_through_a_chain_of_groups(tmp_path, form, how) -> None:
    recorders = trained()
    for one in recorders[:3]:
        one.issue("TENSOR", completes=one.rank < 2)
    for one in recorders[:2]:
        one.issue("default_pg", completes=False)
    line, why = explain_dumps(write(tmp_path, recorders, form, **how))
    assert line == "Rank 3 of 4 blocks the other ranks."
    assert why.startswith("Rank 3 waits in no operation: it has issued 1 collective fewer than the others. ")
    assert "in total 3 ranks wait for it" in why


@pytest.mark.parametrize("how", HOW)
def test_a_rank_whose_device_is_stuck_is_named_although_it_has_issued_as_much_as_the_others(tmp_path, how) -> None:
    recorders = trained()
    for one in recorders:
        for _ in range(2):
            one.issue("TENSOR", completes=one.rank != 2)
        one.issue("default_pg", completes=False)
    lines = [*explain_dumps(write(tmp_path, recorders, **how))]
    assert lines[0] == "Rank 2 of 4 blocks the other ranks."
    assert lines[1].startswith("Rank 2 has not completed all_reduce 4 of TENSOR (ranks 2-3)")


def test_numbers_of_sends_are_not_compared(tmp_path, form) -> None:
    """The first stage sends twice as often as the last one receives, which does not mean that a rank is late."""
    recorders = trained()
    for _ in range(9):
        recorders[0].issue("PIPELINE", "send", peer=2)
    for _ in range(4):
        recorders[2].issue("PIPELINE", "recv", peer=0)
    recorders[2].issue("PIPELINE", "recv", peer=0, completes=False)
    recorders[3].issue("TENSOR", completes=False)
    assert first_line(write(tmp_path, recorders, form)) == "Rank 0 of 4 blocks the other ranks."


def test_a_rank_without_a_dump_is_named_if_the_others_wait_for_it(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", completes=False)
    line, why = explain_dumps(write(tmp_path, recorders[:3]))
    assert line == "Rank 3 of 4 blocks the other ranks."
    assert "Rank 3 is missing" in why


def test_if_all_ranks_are_in_the_same_collective_no_rank_is_blamed(tmp_path, form) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", "broadcast", completes=False)
    lines = [*explain_dumps(write(tmp_path, recorders, form))]
    assert lines[0].startswith("No rank is late: 4 of 4 ranks")
    assert "broadcast 4 of default_pg (ranks 0-3)" in lines[1]


def test_ranks_that_call_different_operations_are_listed(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", "broadcast" if one.rank == 2 else "all_reduce", completes=False)
    assert [*explain_dumps(write(tmp_path, recorders))][-1] == (
        "Ranks call different operations for collective 4 of default_pg (ranks 0-3): Ranks 0-1,3: all_reduce, "
        "Rank 2: broadcast."
    )


def test_if_no_rank_waits_no_rank_is_blamed(tmp_path) -> None:
    assert (
        first_line(write(tmp_path, trained())) == "No hang in a collective: none of the 4 ranks waits in an operation."
    )


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Malicious()),
        b"",
        b"text",
        b"{",
        b"{}",
        b"[1]",
        pickle.dumps({"entries": 3}),
        pickle.dumps({"entries": [3]}),
        pickle.dumps({"entries": [{"state": "scheduled"}]}),
        pickle.dumps({"entries": [], "pg_config": 3}),
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_dump_is_named_and_never_executed(content, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(content)
    assert show(tmp_path, None, []) == 2
    assert "rank_0: not a dump of torch's flight recorder" in capsys.readouterr().err
    assert not (tmp_path / "pwned").exists()


def test_a_directory_without_dumps_or_with_two_of_one_rank_is_refused(tmp_path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(DumpError, match=str(directory)):
            flight_recorder.read_dumps(directory)
    write(tmp_path, trained())
    (tmp_path / "other_2.json").write_text("{}")
    with pytest.raises(DumpError, match=r"nccl_trace_rank_2 and other_2\.json are both dumps of rank 2"):
        flight_recorder.read_dumps(tmp_path)


def test_a_prefix_selects_the_files_of_the_directory(tmp_path) -> None:
    write(tmp_path, trained())
    for name in ("other_2.json", "nccl_trace_rank_of_yesterday_2", "case17"):
        (tmp_path / name).write_text("not a dump")
    assert [dump.rank for dump in flight_recorder.read_dumps(tmp_path / "nccl_trace_rank_")] == [0, 1, 2, 3]
    with pytest.raises(DumpError, match="nccl_trace_: no dump files found"):
        flight_recorder.read_dumps(tmp_path / "nccl_trace_")


def test_a_pipe_or_a_directory_among_the_dumps_does_not_block_the_reader(tmp_path) -> None:
    write(tmp_path, trained())
    os.mkfifo(tmp_path / "pipe_2")
    (tmp_path / "job_1").mkdir()
    assert first_line(tmp_path) == "No hang in a collective: none of the 4 ranks waits in an operation."


HANGING = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as recorder
dist.init_process_group("gloo")
rank, values = dist.get_rank(), torch.ones(4)
group = dist.new_group([0, 1], group_desc="pair")
def dump():
    time.sleep(1.5)
    open(os.path.join(sys.argv[1], f"rank_{rank}"), "wb").write(recorder._dump_fr_trace())
    open(os.path.join(sys.argv[2], f"rank_{rank}.json"), "wb").write(recorder._dump_fr_trace_json())
    time.sleep(1.5)
    os._exit(0)
dist.all_reduce(values)
if rank < 2:
    dist.all_reduce(values, group=group)
threading.Thread(target=dump).start()
if rank == 1:
    time.sleep(60)
if rank < 2:
    dist.all_reduce(values, group=group)
dist.all_reduce(values)
"""


def test_the_dumps_of_a_real_job_name_the_rank_that_hangs(tmp_path) -> None:
    script, *directories = (tmp_path / name for name in ("job.py", "pickle", "json"))
    script.write_text(HANGING)
    for directory in directories:
        directory.mkdir()
    subprocess.run(torchrun(3, script, *directories), env=environment(TORCH_FR_BUFFER_SIZE="100"), check=False)
    for directory in directories:
        line, why = explain_dumps(directory)
        assert line == "Rank 1 of 3 blocks the other ranks."
        assert "Rank 0 waits in all_reduce 2 of pair (ranks 0-1)" in why
