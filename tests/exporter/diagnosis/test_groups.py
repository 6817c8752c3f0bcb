"""Groups of one shape, such as tensor-parallel groups: the one with a slow link is found, a slow rank is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from testing.readings import RUN

from rankscope_exporter.diagnosis import groups
from rankscope_exporter.diagnosis.facts import RunFacts, compare
from rankscope_exporter.diagnosis.readings import CollectiveCounters, Counters, RankReading

STEPS, LENGTH = 100.0, 1.0
PAIRS = ("0-1", "2-3", "4-5", "6-7")
REPLICAS = ("0-6:2", "1-7:2")
Waits = Mapping[str, float]
"""By group what one rank waits in it, as a ratio of the step."""


def waiting(waits: Mapping[int, Waits], clock: str = "host", stages: Sequence[int] | None = None) -> RunFacts:
    """Return the facts of ranks that wait so, and compute for the rest of the step."""
    now = {rank: reading(rank, by_group, clock) for rank, by_group in waits.items()}
    if stages:
        now = {rank: replace(one, stage=stages[rank]) for rank, one in now.items()}
    return compare(RUN, {rank: RankReading(rank, 0.0, 0.0) for rank in waits}, now)


def reading(rank: int, waits: Waits, clock: str) -> RankReading:
    seconds = {name: STEPS * LENGTH * ratio for name, ratio in waits.items()}
    total = sum(seconds.values())
    phases = {"forward": STEPS * LENGTH - total, "collective_wait": total}
    if clock == "host":
        counted = CollectiveCounters(group_waits=seconds)
        return RankReading(rank, STEPS, 0.0, "0-7", counters=Counters(STEPS, phases, collectives=counted))
    # One step in ten is measured on the device, and the host waits for none of it.
    measured = {name: value / 10 for name, value in seconds.items()}
    counted = CollectiveCounters(group_waits=dict.fromkeys(waits, 0.0), device_group_waits=measured)
    on_device = {name: value / 10 for name, value in phases.items()}
    counters = Counters(STEPS, {"other": STEPS * LENGTH}, STEPS / 10, on_device, collectives=counted)
    return RankReading(rank, STEPS, 0.0, "0-7", counters=counters)


def mesh(slow: str = "", excess: float = 0.0) -> dict[int, dict[str, float]]:
    """Return the waits of four tensor-parallel pairs with two groups of replicas: all wait for the slow pair."""
    waits: dict[int, dict[str, float]] = {}
    for rank in range(8):
        pair = PAIRS[rank // 2]
        is_slow = pair == slow
        waits[rank] = {pair: 0.1 + excess * is_slow, REPLICAS[rank % 2]: 0.05 + excess * (bool(slow) and not is_slow)}
    return waits


def excess(run: RunFacts) -> float:
    found = groups.slowest(run)
    assert found is not None
    return found.excess


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_with_a_slow_link_is_named_with_what_it_waits_beyond_the_others(pair: str, clock: str) -> None:
    found = groups.slowest(waiting(mesh(pair, 0.3), clock))
    assert found is not None
    assert found.name == pair
    assert (found.wait, found.peers_wait, found.excess) == pytest.approx((0.4, 0.1, 0.3))


@pytest.mark.parametrize("clock", ["host", "device"])
def test_a_healthy_mesh_has_no_excess(clock: str) -> None:
    assert excess(waiting(mesh(), clock)) == pytest.approx(0.0)


def test_a_slow_rank_within_a_pair_is_no_slow_link() -> None:
    waits = mesh()
    waits[2]["2-3"] = 0.4  # it waits for rank 3
    assert excess(waiting(waits)) == pytest.approx(0.0)


def test_a_slow_link_between_replicas_is_named() -> None:
    waits = mesh()
    for rank in (1, 3, 5, 7):
        waits[rank]["1-7:2"] += 0.2
    for rank in (0, 2, 4, 6):
        waits[rank][PAIRS[rank // 2]] += 0.2  # for the partner, which does not wait for it
    found = groups.slowest(waiting(waits))
    assert found is not None
    assert (found.name, found.excess) == ("1-7:2", pytest.approx(0.2))


def test_groups_of_other_shapes_are_not_compared() -> None:
    waits = {rank: {PAIRS[rank // 2]: 0.1, f"{rank % 2},{rank % 2 + 2}": 0.5} for rank in range(4)}
    assert excess(waiting(waits)) == pytest.approx(0.0)


def test_tensor_parallel_groups_of_different_stages_are_not_compared() -> None:
    """The last stage also computes the loss. The links of its two pairs are equal."""
    waits = {rank: {PAIRS[rank // 2]: 0.05 if rank < 4 else 0.2} for rank in range(8)}
    stages = [0] * 4 + [1] * 4
    assert excess(waiting(waits)) > 0.1
    assert excess(waiting(waits, stages=stages)) == pytest.approx(0.0)
    for rank in (6, 7):
        waits[rank][PAIRS[3]] = 0.5
    found = groups.slowest(waiting(waits, stages=stages))
    assert found is not None
    assert (found.name, found.excess) == ("6-7", pytest.approx(0.3))


def test_a_group_with_a_rank_that_is_not_here_is_not_compared() -> None:
    waits = mesh("6-7", 0.3)
    del waits[7]
    assert excess(waiting(waits)) == pytest.approx(0.0)


@pytest.mark.parametrize("waits", [{0: {"0-1": 0.5}, 1: {"0-1": 0.5}}, {0: {}, 1: {}}, {0: {"…": 0.5}}])
def test_a_group_without_another_of_its_shape_is_compared_with_nothing(waits: dict[int, Waits]) -> None:
    assert groups.slowest(waiting(waits)) is None
