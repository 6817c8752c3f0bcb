"""`rankscope hang DIR`: the rank that blocks a run, from dumps of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing.torchrun import environment, torchrun

from rankscope_exporter.hangs import flight_recorder, plain_pickle
from rankscope_exporter.hangs.command import explain_dumps, show
from rankscope_exporter.hangs.flight_recorder import DumpError

RANKS = 4
TENSOR = {0: ("5", [0, 1]), 1: ("5", [0, 1]), 2: ("6", [2, 3]), 3: ("6", [2, 3])}
PIPELINE = {0: ("7", [0, 2]), 1: ("8", [1, 3]), 2: ("7", [0, 2]), 3: ("8", [1, 3])}
WORLD = ("0", [0, 1, 2, 3])
PEER = {0: 2, 1: 3, 2: 0, 3: 1}
"""The other rank of each rank's pipeline."""
Entry = dict[str, Any]


class Recorder:
    """The flight recorder of one rank with NCCL. Groups are numbered in the order of their creation."""

    def __init__(self, rank: int, **groups: tuple[str, list[int]]) -> None:
        self.rank = rank
        self._groups = {"default_pg": WORLD, "TENSOR": TENSOR[rank], "PIPELINE": PIPELINE[rank], **groups}
        self._counts = {name: [0, 0] for name in self._groups}
        self.entries: list[Entry] = []

    def issue(self, group: str, operation: str = "all_reduce", completes: bool = True, peer: int | None = None) -> None:
        """Issue one operation; its peer is a rank of the run."""
        counts = self._counts[group]
        counts[0] += 1
        counts[1] += completes
        self.record(group, self._title(group, operation, peer), completes, is_pairwise=peer is not None)

    def issue_batch(self, group: str, completes: bool = True, **peers: int) -> None:
        """Issue sends and receives as a batch. Only the entry at its end has a state."""
        counts = self._counts[group]
        counts[0] += 1
        counts[1] += completes
        for operation, peer in peers.items():
            self.record(group, self._title(group, operation, peer), completes=False, is_pairwise=True)
        self.record(group, "coalesced", completes, is_pairwise=True)

    def record(self, group: str, title: str, completes: bool = True, is_pairwise: bool = False, **how: Any) -> None:
        number = self._counts[group][0]
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": [*self._groups].index(group),
                "process_group": (self._groups[group][0], group),
                "collective_seq_id": 0 if is_pairwise else number,
                "p2p_seq_id": number if is_pairwise else 0,
                "profiling_name": f"nccl:{title}",
                "state": "completed" if completes else "scheduled",
                "is_p2p": is_pairwise,
                **how,
            }
        )

    def _title(self, group: str, operation: str, peer: int | None) -> str:
        ranks = self._groups[group][1]
        if peer is None:
            return operation
        return f"{operation} {ranks.index(self.rank)}{'->' if operation == 'send' else '<-'}{ranks.index(peer)}"

    def document(self, *, only_pending: bool = False, has_status: bool = True) -> dict[str, Any]:
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
        document = one.document(**how)
        if form == "json" and not document["entries"]:
            del document["entries"]  # as torch does
        write_document(directory, one.rank, document, form)
    return directory


def write_document(directory: Path, rank: int, document: Any, form: str = "pickle") -> Path:
    path = directory / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(document) if form == "pickle" else json.dumps(document).encode())
    return path


def trained() -> list[Recorder]:
    """Return the recorders of ranks that have made some steps."""
    recorders = [Recorder(rank) for rank in range(RANKS)]
    for one in recorders:
        for _ in range(3):
            one.issue("TENSOR")
            one.issue("default_pg")
    return recorders


def hung(*ranks: int, operation: str = "all_reduce") -> list[Recorder]:
    """Return the recorders of such ranks, of which these, or all, wait in a collective of all ranks."""
    recorders = trained()
    for rank in ranks or range(RANKS):
        recorders[rank].issue("default_pg", operation, completes=False)
    return recorders


def first_line(directory: Path) -> str:
    return next(explain_dumps(directory))


def why(directory: Path, rank: int) -> str:
    """Return why this rank blocks the others."""
    line, reason, *_ = explain_dumps(directory)
    assert line == f"Rank {rank} of 4 blocks the other ranks."
    return reason


HOW = [{"only_pending": True}, {"has_status": False}, {}]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_has_not_issued_a_collective_is_found_through_a_chain_of_groups(tmp_path, form, how) -> None:
    recorders = trained()
    for one in recorders[:3]:
        one.issue("TENSOR", completes=one.rank < 2)
    for one in recorders[:2]:
        one.issue("default_pg", completes=False)
    reason = why(write(tmp_path, recorders, form, **how), 3)
    assert reason.startswith("Rank 3 waits in no operation: it has issued 1 collective fewer than the others. ")
    assert "in total 3 ranks wait for it" in reason


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


@pytest.mark.parametrize("how", HOW)
def test_the_operations_of_a_completed_batch_are_complete_although_they_have_no_state(tmp_path, form, how) -> None:
    """`batch_isend_irecv` with NCCL: stages that have exchanged their tensors wait for rank 3 in a collective."""
    recorders = trained()
    for _ in range(3):
        for rank, peer in PEER.items():
            recorders[rank].issue_batch("PIPELINE", send=peer, recv=peer)
    for one in recorders[:3]:
        one.issue("default_pg", completes=False)
    reason = why(write(tmp_path, recorders, form, **how), 3)
    assert "Rank 0 waits in all_reduce 4 of default_pg (ranks 0-3); in total 3 ranks wait for it" in reason


@pytest.mark.parametrize("how", HOW)
def test_a_batch_waits_for_all_its_peers(tmp_path, how) -> None:
    """Rank 0 waits for rank 1 only in the second operation of its batch."""
    groups = [("9", [0, 1, 2, 3])] * RANKS
    recorders = [Recorder(rank, STAGES=groups[rank]) for rank in range(RANKS)]
    recorders[0].issue_batch("STAGES", completes=False, send=2, recv=1)
    recorders[2].issue_batch("STAGES", completes=False, recv=0)
    recorders[1].issue("TENSOR")
    recorders[3].issue("TENSOR")
    reason = why(write(tmp_path, recorders, **how), 1)
    assert "Rank 0 waits in a batch of sends and receives with ranks 1-2; in total 2 ranks wait for it" in reason


@pytest.mark.parametrize("how", [{"only_pending": True}, {}])
def test_a_batch_without_its_end_is_waited_in(tmp_path, how) -> None:
    """NCCL connects the ranks when the batch ends: the host may block before the end is recorded."""
    recorders = trained()
    recorders[0].issue_batch("PIPELINE", send=2)
    for operation in ("recv 0<-1", "send 0->1"):
        recorders[0].record("PIPELINE", operation, completes=False, is_pairwise=True, p2p_seq_id=9)
    reason = why(write(tmp_path, recorders, **how), 2)
    assert "Rank 0 waits in a batch of sends and receives with rank 2" in reason


@pytest.mark.parametrize("end", ["coalesced", "ALLGATHER_coalesced"])
def test_a_batch_of_collectives_is_one_collective(tmp_path, form, end) -> None:
    """`all_gather` of uneven sizes is a batch of broadcasts, without a state before its end."""
    recorders = trained()
    for completes in (True, False):
        for one in recorders if completes else recorders[:3]:
            one.issue("default_pg", "_broadcast_oop", completes=False)
            one.record("default_pg", "_broadcast_oop", completes=False)
            one.record("default_pg", end, completes=completes)
    reason = why(write(tmp_path, recorders, form, has_status=False), 3)
    assert f"Rank 0 waits in {end} 5 of default_pg" in reason


def test_an_operation_that_was_retired_without_completing_has_timed_out(tmp_path) -> None:
    recorders = hung(0, 1, 2)
    for one in recorders[:3]:
        one.entries[-1]["retired"] = True
    assert first_line(write(tmp_path, recorders)) == "Rank 3 of 4 blocks the other ranks."


def test_groups_of_different_ranks_may_have_one_name(tmp_path, form) -> None:
    """`split_group` of torch 2.5 to 2.8 gives all its parts the same name, such as the groups of a device mesh."""
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    recorders = [Recorder(rank, mesh_tp=("3", pairs[rank])) for rank in range(RANKS)]
    for one in recorders:
        for _ in range(1 if one.rank < 2 else 5):
            one.issue("mesh_tp")
    recorders[2].issue("mesh_tp", completes=False)
    reason = why(write(tmp_path, recorders, form), 3)
    assert "Rank 2 waits in all_reduce 6 of mesh_tp (ranks 2-3)." in reason


def test_the_dumps_of_torch_2_3_have_one_number_and_lists_of_ranks(tmp_path) -> None:
    recorders = hung(0, 1, 2)
    for one in recorders:
        document = one.document(has_status=False)
        document["pg_config"] = {0: WORLD[1], 1: TENSOR[one.rank][1]}
        for entry in document["entries"]:
            entry["seq_id"] = entry.pop("collective_seq_id")
            for name in ("process_group", "p2p_seq_id", "is_p2p"):
                del entry[name]
        write_document(tmp_path, one.rank, document)
    reason = why(tmp_path, 3)
    assert "Rank 0 waits in all_reduce 4 of group 0 (ranks 0-3); in total 3 ranks wait for it" in reason


UNSEEN = "The ranks here wait for a rank that is not visible here."


def test_a_rank_without_a_dump_is_named_if_the_others_wait_for_it_but_not_blamed(tmp_path) -> None:
    line, unseen = explain_dumps(write(tmp_path, hung()[:3]))
    assert line == UNSEEN
    assert unseen == (
        "Rank 3 of 4 is not visible here: it has no readable dump. Rank 0 waits in all_reduce 4 of default_pg "
        "(ranks 0-3); in total 3 ranks wait for it, directly or through others. "
        "Put the dumps of all nodes into one directory."
    )


def check_missing(directory: Path, damaged: Path) -> None:
    """Check that rank 1 counts as missing, and that the reason names its dump."""
    line, missing, note = explain_dumps(directory)
    assert line == UNSEEN
    assert missing.startswith("Rank 1 of 4 is not visible here: it has no readable dump. ")
    assert note.startswith(f"{damaged}: not a dump of torch's flight recorder: ")
    assert note.endswith(". Its rank counts as missing.")
    assert len(note) < len(str(damaged)) + 300


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_rank_with_a_part_of_a_dump_counts_as_missing(tmp_path, form, part) -> None:
    """A rank that was killed while torch wrote its dump leaves a part of it."""
    cut = write(tmp_path, hung(), form) / "nccl_trace_rank_1"
    cut.write_bytes(cut.read_bytes()[: int(part * cut.stat().st_size)])
    check_missing(tmp_path, cut)


def test_ranks_without_a_dump_are_named_in_one_line_after_the_known_ones(tmp_path) -> None:
    """The dumps of one node show its late rank, and only that the ranks of the other nodes are unknown."""
    world = ("0", [*range(64)])
    recorders = [Recorder(rank, default_pg=world) for rank in range(RANKS)]
    for one in recorders:
        one.issue("default_pg", completes=False)
    recorders[2].entries.clear()
    recorders[2] = Recorder(2, default_pg=world)
    line, why, missing = explain_dumps(write(tmp_path, recorders))
    assert line == "Rank 2 of 64 blocks the other ranks."
    assert why.startswith("Rank 2 waits in no operation")
    assert missing == (
        "Ranks 4-63 of 64 are not visible here: they have no readable dumps. "
        "Put the dumps of all nodes into one directory."
    )


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_two_ranks_that_only_wait_for_each_other_are_named(tmp_path, form, operation) -> None:
    recorders = trained()
    for rank, peer in ((0, 2), (2, 0)):
        recorders[rank].issue("PIPELINE", operation, peer=peer, completes=False)
    assert [*explain_dumps(write(tmp_path, recorders, form))] == [
        "Ranks 0,2 of 4 block the other ranks.",
        "Ranks 0,2 wait for each other: their order of operations differs, or their link fails. "
        f"Rank 0 waits in a {operation} with rank 2.",
    ]


def test_if_all_ranks_are_in_the_same_collective_no_rank_is_blamed(tmp_path, form) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", "broadcast", completes=False)
    lines = [*explain_dumps(write(tmp_path, recorders, form))]
    assert lines[0].startswith("No rank is late: 4 of 4 ranks")
    assert "broadcast 4 of default_pg (ranks 0-3)" in lines[1]


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_whose_device_has_not_started_what_the_others_have_is_named(tmp_path, form, late) -> None:
    """Torch records the start with TORCH_NCCL_ENABLE_TIMING."""
    recorders = hung()
    for one in recorders:
        one.entries[-1]["state"] = "scheduled" if one.rank == late else "started"
    reason = why(write(tmp_path, recorders, form), late)
    issued = f"Rank {late} has issued all_reduce 4 of default_pg (ranks 0-3)"
    assert reason.startswith(f"{issued}, but an earlier kernel on its device does not end.")
    assert "in total 3 ranks wait for it" in reason


def test_if_all_devices_have_started_the_collective_no_rank_is_blamed(tmp_path) -> None:
    recorders = hung()
    for one in recorders:
        one.entries[-1]["state"] = "started"
    assert first_line(write(tmp_path, recorders)).startswith("No rank is late: 4 of 4 ranks")


def test_ranks_that_call_different_operations_are_listed(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", "broadcast" if one.rank == 2 else "all_reduce", completes=False)
    assert [*explain_dumps(write(tmp_path, recorders))] == [
        "Ranks call different operations for collective 4 of default_pg (ranks 0-3): Ranks 0-1,3: all_reduce, "
        "Rank 2: broadcast."
    ]


def test_only_the_first_disagreement_of_a_group_is_listed_even_if_a_rank_has_completed_its_operation(tmp_path) -> None:
    """The root of a broadcast does not wait for the others. All its later collectives have other numbers."""
    recorders = trained()
    for one in recorders:
        if one.rank == 0:
            one.issue("default_pg", "broadcast")
        for _ in range(3):
            one.issue("default_pg", completes=False)
    lines = [line for line in explain_dumps(write(tmp_path, recorders)) if "different operations" in line]
    assert lines == [
        "Ranks call different operations for collective 4 of default_pg (ranks 0-3): Rank 0: broadcast, Ranks 1-3: "
        "all_reduce."
    ]


@pytest.mark.parametrize(
    ("operation", "is_listed"), [("all_reduce", True), ("_all_gather_base", True), ("gather", False)]
)
def test_ranks_that_give_different_sizes_are_listed_if_the_operation_needs_equal_ones(
    tmp_path, form, operation, is_listed
) -> None:
    recorders = trained()
    for one in recorders:
        one.issue("default_pg", operation, completes=False)
        one.entries[-1]["input_sizes"] = [[3, 4], [2]] if one.rank == 2 else [[16]]
    listed = [line for line in explain_dumps(write(tmp_path, recorders, form)) if "different operations" in line]
    assert listed == is_listed * [
        "Ranks call different operations for collective 4 of default_pg (ranks 0-3): "
        f"Ranks 0-1,3: {operation} of 16 elements, Rank 2: {operation} of 14 elements."
    ]


def test_a_stopped_rank_that_has_no_pending_operation_is_named(tmp_path, form) -> None:
    recorders = trained()
    for one in recorders:
        if one.rank != 2:
            one.issue("default_pg", completes=False)
    write(tmp_path, recorders, form, only_pending=True)
    assert first_line(tmp_path) == "Rank 2 of 4 blocks the other ranks."


def test_a_rank_that_has_not_completed_what_another_one_has_is_named_in_spite_of_an_earlier_send(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        if one.rank == 2:
            one.issue("PIPELINE", "send", completes=False, peer=0)
        one.issue("TENSOR", completes=one.rank != 2)
        one.issue("default_pg", completes=False)
    recorders[0].issue("PIPELINE", "recv", completes=False, peer=2)
    write(tmp_path, recorders, only_pending=True)
    reason = why(tmp_path, 2)
    assert reason.startswith("Rank 2 has not completed all_reduce ")


def test_a_second_rank_that_has_stopped_and_waits_for_the_first_one_is_named(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        if one.rank == 1:
            continue
        one.issue("default_pg", completes=False)
        if one.rank != 3:
            one.issue("default_pg", completes=False)
            one.issue("default_pg", completes=False)
    write(tmp_path, recorders, only_pending=True)
    line, _, second = explain_dumps(tmp_path)
    assert line == "Rank 1 of 4 blocks the other ranks."
    assert second == (
        "Rank 3 waits too, but has issued 2 collectives fewer than the others of default_pg (ranks 0-3), "
        "which wait in the same one: its process may be stopped."
    )


def test_ranks_that_others_wait_for_in_one_collective_are_one_line(tmp_path) -> None:
    recorders = trained()
    for one in recorders:
        if one.rank > 1:
            one.issue("TENSOR", completes=False)
        else:
            one.issue("PIPELINE", "recv", completes=False, peer=one.rank + 2)
    write(tmp_path, recorders)
    line, why = explain_dumps(tmp_path)
    assert line == "Ranks 2-3 of 4 block the other ranks."
    assert why.startswith("Ranks 2-3 have not completed all_reduce ")


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


def test_a_directory_without_dumps_is_refused(tmp_path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(DumpError, match=str(directory)):
            flight_recorder.read_dumps(directory)


def test_a_rank_with_two_dumps_counts_as_missing(tmp_path) -> None:
    write(tmp_path, trained())
    (tmp_path / "other_2.json").write_text("{}")
    dumps, unreadable = flight_recorder.read_dumps(tmp_path)
    assert [dump.rank for dump in dumps] == [0, 1, 3]
    assert [str(error) for error in unreadable] == [
        f"{tmp_path}/nccl_trace_rank_2 and other_2.json are both dumps of rank 2"
    ]


def test_the_reasons_of_some_unreadable_dumps_are_shown(tmp_path) -> None:
    write(tmp_path, trained())
    for rank in range(10, 35):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text("text")
    lines = [*explain_dumps(tmp_path)]
    assert sum("counts as missing" in line for line in lines) == 20
    assert lines[-1] == "5 more files could not be read."


DAMAGED = {
    "entries": [
        {},
        3,
        [3],
        [None],
        [{}],
    ],
    "pg_config": [3, [], {"0": 3}, {"0": {"ranks": 7}}, {"0": {"ranks": [None]}}, {"0": ["x"]}, {"0": {"desc": 3}}],
    "pg_status": [
        3,
        [],
        {"0": 3},
        {"0": {}},
        {"x": {}},
        {"0": {"last_enqueued_collective": 1}},
        {"0": {"last_enqueued_collective": None, "last_completed_collective": 1}},
        {"0": {"last_enqueued_collective": 10**400, "last_completed_collective": 1}},
        {"0": {"last_enqueued_collective": float("nan"), "last_completed_collective": 1}},
    ],
}
DAMAGED_ENTRY = {
    "record_id": [None, "x", [], {}, 10**400, float("nan")],
    "pg_id": [None, "x", [], {}, 10**400, float("inf")],
    "process_group": [3, [], ["0"], ["0", 3], [["0"], "x"], ["0", "x", "y"], ["x" * 10_000, "y"]],
    "collective_seq_id": [None, "x", [], 10**400, float("nan"), "9" * 5000],
    "p2p_seq_id": [None, "x", [], {}, 10**400],
    "profiling_name": [None, 3, [], {}, "x" * 10_000],
    "state": [None, 3, [], {}, "x" * 10_000],
    "input_sizes": [3, "x", [3], [["x"]], [[None]], [[10**400]], [{}], {"a": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, values in DAMAGED.items() for value in values),
        *((name, value) for name, values in DAMAGED_ENTRY.items() for value in values),
    ],
)
def test_a_value_of_another_type_costs_only_its_rank(tmp_path, form, name, value) -> None:
    recorders = hung()
    write(tmp_path, recorders, form)
    document = recorders[1].document()
    (document if name in document else document["entries"][2])[name] = value
    check_missing(tmp_path, write_document(tmp_path, 1, document, form))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_pickle_with_damaged_bytes_is_read_or_refused(data) -> None:
    damaged = bytearray(pickle.dumps(trained()[0].document()))
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        plain_pickle.loads(bytes(damaged))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(-(2**30), 2**30), inner)
    ),
)


@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol) -> None:
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


def test_a_prefix_selects_the_files_of_the_directory(tmp_path) -> None:
    write(tmp_path, trained())
    for name in ("other_2.json", "nccl_trace_rank_of_yesterday_2", "case17"):
        (tmp_path / name).write_text("not a dump")
    dumps, unreadable = flight_recorder.read_dumps(tmp_path / "nccl_trace_rank_")
    assert ([dump.rank for dump in dumps], unreadable) == ([0, 1, 2, 3], [])
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
    while len(os.listdir(sys.argv[2])) < 3:  # an end would end the others' operations
        time.sleep(0.1)
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
