"""Waits between the ranks of a hanging run, and the ranks that block all others."""

from __future__ import annotations

import pytest

from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    blocking_ranks,
    collectives_behind,
    unfinished_group,
    victims,
    waits,
    with_unused_groups,
)

GROUPS = {"0-3": (0, 1, 2, 3), "0-1": (0, 1), "2-3": (2, 3), "0-2:2": (0, 2), "1-3:2": (1, 3)}


def waiting(rank: int, group: str, number: float, completed: float | None = None, **issued: float) -> Position:
    """Return a rank that waits in the last collective that it has issued."""
    known = {} if completed is None else {group: completed}
    return Position(rank, {**issued, group: number}, known, Operation("all_reduce", group, number))


def late(*positions: Position) -> list[set[int]]:
    return [set(ranks) for ranks in blocking_ranks(waits(positions, GROUPS))]


@pytest.mark.parametrize("missing", range(4))
def test_the_others_wait_for_a_rank_that_has_not_issued_the_collective(missing) -> None:
    others = [waiting(rank, "0-3", 5.0) for rank in range(4) if rank != missing]
    assert late(*others, Position(missing, {"0-3": 4.0})) == [{missing}]


def test_all_missing_ranks_are_named() -> None:
    assert late(waiting(0, "0-3", 5), waiting(1, "0-3", 5), Position(2), Position(3, {"0-3": 4})) == [{2}, {3}]


def test_an_unknown_rank_counts_as_missing() -> None:
    assert late(*[waiting(rank, "0-3", 5) for rank in range(3)]) == [{3}]


def test_a_rank_that_waits_in_another_group_is_a_victim() -> None:
    """Rank 0 waits for rank 2, 1 for 3, and 2 for 3 in another group."""
    chain = [waiting(0, "0-2:2", 5), waiting(1, "1-3:2", 5), waiting(2, "2-3", 5, **{"0-2:2": 4.0}), Position(3)]
    assert late(*chain) == [{3}]
    assert [*victims(waits(chain, GROUPS), frozenset({3}))] == [0, 1, 2]


def test_a_rank_whose_device_has_not_reached_the_collective_is_late() -> None:
    others = [waiting(rank, "0-3", 9.0, completed=8.0) for rank in range(3)]
    stuck = waiting(3, "0-3", 6.0, completed=5.0)
    ahead = Position(3, {"0-3": 9.0}, stuck.completed, stuck.waits_in)
    assert late(*others, ahead) == [{3}]


def test_if_all_ranks_have_issued_and_none_has_completed_no_rank_is_late() -> None:
    assert not late(*[waiting(rank, "0-3", 5.0, completed=4.0) for rank in range(4)])
    assert not late(*[waiting(rank, "0-3", 5.0) for rank in range(4)])


def test_a_send_or_receive_waits_for_its_peer() -> None:
    receives = Position(0, waits_in=Operation("recv", "0-3", 1.0, peer=2))
    assert late(receives, Position(1), Position(2)) == [{2}]


def test_a_batch_waits_for_all_its_peers() -> None:
    batch = Position(0, waits_in=Operation("batch", "0-3", 1.0, peer=2, more_peers=(3,)))
    assert late(batch, Position(1), Position(2), Position(3)) == [{2}, {3}]


def test_a_receive_from_an_unknown_rank_waits_for_ranks_of_its_group_that_are_not_in_it() -> None:
    receives = [Position(rank, waits_in=Operation("recv", "0-3", 1.0, is_pairwise=True)) for rank in (0, 1, 2)]
    assert late(*receives, Position(3)) == [{3}]
    assert late(*receives) == [{3}], "it has ended"
    assert late(*receives[:2], Position(2)) == [{2}], "rank 3 may be on another node"
    assert late(*receives[:2], waiting(2, "2-3", 7.0), Position(3)) == [{3}], "rank 2 waits in another group"


def test_ranks_that_wait_for_each_other_are_named_together() -> None:
    ring = [Position(rank, waits_in=Operation("recv", "0-3", 1.0, peer=1 - rank)) for rank in (0, 1)]
    assert late(*ring, Position(2)) == [{0, 1}]
    third = Position(2, waits_in=Operation("recv", "0-3", 1.0, peer=0))
    assert late(*ring, third) == [{0, 1}]
    assert late(ring[0], waiting(1, "1-3:2", 3.0), Position(3)) == [{3}]


def test_a_rank_that_no_rank_waits_for_is_not_named() -> None:
    assert not late(Position(0), Position(1), Position(2, {"2-3": 7.0}), Position(3, {"2-3": 6.0}))


def test_the_collectives_that_a_rank_lacks_are_counted_in_the_group_where_it_lacks_most() -> None:
    issued = {0: {"0-2": 9.0, "0-1": 7.0}, 1: {"0-2": 8.0, "0-1": 4.0}, 2: {"0-2": 9.0}, 3: {}}
    assert [collectives_behind(rank, issued) for rank in range(5)] == [0.0, 3.0, 0.0, 0.0, 0.0]


def test_a_member_of_a_group_that_has_not_used_it_has_issued_nothing() -> None:
    issued = {0: {"0-2": 9.0, "0-1": 1.0}, 1: {"0-2": 9.0}, 2: {"0-2": 9.0, "other…": 3.0}, 3: {}}
    assert with_unused_groups(issued) == {**issued, 1: {"0-2": 9.0, "0-1": 0.0}}
    full = {1: {f"1-{last}": 1.0 for last in range(2, 18)}, 0: {"0-1": 1.0}}
    assert with_unused_groups(full) == full, "the other groups of the rank are unknown"


def test_a_rank_is_in_the_first_group_in_which_another_rank_has_issued_less() -> None:
    issued = {0: {"0-2": 9.0, "0-1": 4.0}, 1: {"0-2": 9.0, "0-1": 3.0}, 2: {"0-2": 8.0}}
    assert [unfinished_group(rank, issued) for rank in issued] == ["0-2", "0-2", None]
    assert unfinished_group(0, {0: {"0-2": 9.0}}) is None
