"""Every kind of collective on four ranks: calls, bytes, bus bytes, durations and groups, against expected values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testing.torchrun import reports

JOB = Path(__file__).parents[1] / "jobs" / "every_collective.py"
LATE = 0.3  # seconds by which rank 3 is late, as in the job

# By kind: the operation, the calls, a rank's payload bytes, and the bus bytes by NCCL-tests' factors for four ranks:
# 3/2 of an all-reduce, 3/4 of the whole size of a gather, scatter or exchange.
EXPECTED: dict[str, tuple[str, int, float, float]] = {
    "all_reduce": ("all_reduce", 1, 400, 600),
    "async": ("all_reduce", 1, 400, 600),
    "future": ("all_reduce", 1, 400, 600),
    "thread": ("all_reduce", 1, 400, 600),
    "all_gather": ("all_gather", 1, 400, 1200),
    "all_gather_into_tensor": ("all_gather", 1, 400, 1200),
    "reduce_scatter_tensor": ("reduce_scatter", 1, 400, 300),
    "broadcast": ("broadcast", 1, 400, 400),
    "reduce": ("reduce", 1, 400, 400),
    "gather": ("gather", 1, 400, 1200),
    "scatter": ("scatter", 1, 100, 300),
    "all_to_all": ("all_to_all", 1, 400, 300),
    "barrier": ("barrier", 1, 0, 0),
    "monitored_barrier": ("barrier", 1, 0, 0),
    "coalesced": ("all_reduce", 1, 80, 120),
    "functional": ("all_reduce", 1, 400, 600),
    "half": ("all_reduce", 1, 400, 400),
    "interleaved": ("all_reduce", 1, 400, 400),
    "again": ("all_reduce", 1, 400, 600),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the output of each of the four ranks, in order."""
    return reports(4, JOB, RANKSCOPE_RUN_DIR=str(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_collective_is_counted_with_its_bytes_and_bus_bytes(ranks: list[dict[str, Any]], kind: str) -> None:
    op, calls, size, bus_bytes = EXPECTED[kind]
    for rank in ranks:
        found = rank["kinds"][kind]
        assert found["collectives"] == {op: calls}
        assert found["collective_bytes"] == ({op: size} if size else {})
        # The last rank of an asynchronous collective may find it complete when it waits, and so may a rank that is
        # preempted between a synchronous call and its wait. Then the duration is not known.
        if op in found["collective_duration_seconds"]:
            assert found["collective_bus_bytes"] == ({op: bus_bytes} if bus_bytes else {})
        else:
            assert found["collective_bus_bytes"] == {}
    if kind not in ("async", "functional"):
        assert any(op in rank["kinds"][kind]["collective_duration_seconds"] for rank in ranks)


@pytest.mark.parametrize("kind", EXPECTED)
def test_no_collective_is_open_after_it_returns(ranks: list[dict[str, Any]], kind: str) -> None:
    assert [rank["kinds"][kind]["open"] for rank in ranks] == [0] * 4


def test_an_object_collective_counts_as_its_two_collectives(ranks: list[dict[str, Any]]) -> None:
    assert [rank["kinds"]["objects"]["collectives"] for rank in ranks] == [{"all_gather": 2}] * 4


@pytest.mark.parametrize("kind", ["all_reduce", "future", "thread"])
def test_the_other_ranks_wait_for_the_late_one(ranks: list[dict[str, Any]], kind: str) -> None:
    waits = [rank["kinds"][kind]["collective_seconds"]["all_reduce"] for rank in ranks]
    assert all(wait > 0.8 * LATE for wait in waits[:3])
    assert waits[3] < 0.5 * LATE


def test_an_asynchronous_collective_lasts_from_its_issue_and_only_its_end_is_exposed(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks[:3]:
        found = rank["kinds"]["async"]
        assert found["collective_duration_seconds"]["all_reduce"] > 0.8 * LATE
        exposed = found["collective_seconds"]["all_reduce"]
        assert exposed < found["collective_duration_seconds"]["all_reduce"] - 0.2 * LATE


def test_the_duration_of_a_collective_whose_end_was_not_seen_is_absent(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["kinds"]["complete"]
        assert found["collectives"] == {"all_reduce": 1}
        assert found["collective_duration_seconds"] == found["collective_bus_bytes"] == {}


def test_sends_between_two_ranks_are_counted(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["kinds"]["neighbors"]["collectives"] == {"send": 1, "recv": 1}
    calls = [rank["kinds"]["one_pair"]["collectives"] for rank in ranks]
    assert calls == [{"send": 1}, {"recv": 1}, {}, {}]


def test_fsdp2_and_its_clipping_are_seen(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["kinds"]["fsdp2"]["collectives"]
        assert found["all_gather"] >= 1
        assert found["reduce_scatter"] >= 1
        assert found["all_reduce"] >= 1


def test_the_duration_of_ddps_all_reduce_is_ddps_own_sample(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[:3]:
        found = rank["kinds"]["ddp"]
        assert found["collectives"] == {"ddp_all_reduce": 12}
        assert found["collective_bytes"] == {"ddp_all_reduce": 12 * 256}
        assert found["collective_bus_bytes"] == {"ddp_all_reduce": 256 * 3 / 2}  # of the one pass that was read
        assert 0.8 * LATE / 10 < found["collective_duration_seconds"]["ddp_all_reduce"] < LATE


def test_ddps_collectives_advance_the_sequence_equally_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    # Twelve passes of one bucket each, and DDP's collectives to agree on its buckets.
    advances = [rank["kinds"]["ddp"]["group_collectives"]["0-3"] for rank in ranks]
    assert advances[0] >= 12
    assert len(set(advances)) == 1


def test_groups_are_named_by_their_ranks_and_the_default_group_is_first(ranks: list[dict[str, Any]]) -> None:
    assert [rank["groups"] for rank in ranks] == [
        ["0-3", "0-1", "0,2"],
        ["0-3", "0-1", "1,3"],
        ["0-3", "2-3", "0,2"],
        ["0-3", "2-3", "1,3"],
    ]


def test_a_wait_is_charged_to_its_group(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind, index in (("all_reduce", 0), ("half", 1), ("interleaved", 2), ("again", 0)):
            found = rank["kinds"][kind]
            assert found["group_wait_seconds"] == {rank["groups"][index]: found["collective_seconds"]["all_reduce"]}
            assert found["group_collectives"] == {rank["groups"][index]: 1}


def test_sequence_numbers_agree_although_some_ranks_send_more_than_others(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["kinds"]["one_pair"]["group_collectives"] == {}
        assert rank["kinds"]["neighbors"]["group_collectives"] == {}
        assert rank["kinds"]["monitored_barrier"]["group_collectives"] == {"0-3": 1}
    assert len({tuple(rank["numbers"]) for rank in ranks}) == 1
