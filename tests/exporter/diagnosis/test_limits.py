"""The limits over all owners: fair shares, and the CPU time of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from testing.clock import Clock

from rankscope_exporter.diagnosis.limits import (
    CPU_SECONDS,
    HOLD_SECONDS,
    OWNERS,
    RANK_CPU_SECONDS,
    CpuTime,
    fair_shares,
)
from rankscope_exporter.diagnosis.readings import Run

HONEST, HOSTILE = ("llm", "1000"), ("bomb", "6666")


def test_demands_that_fit_are_not_limited() -> None:
    assert fair_shares({"a": 1.0, "b": 9.0}, 10.0) == {"a": 1.0, "b": 9.0}


def test_an_owner_of_little_is_not_limited_by_those_of_much_and_these_have_the_same_share() -> None:
    assert fair_shares({"big": 90.0, "small": 2.0, "huge": 900.0}, 32.0) == pytest.approx(
        {"big": 15.0, "small": 2.0, "huge": 15.0}
    )


def test_what_an_owner_does_not_need_is_for_the_others() -> None:
    assert sum(fair_shares({"a": 3.0, "b": 50.0, "c": 50.0}, 64.0).values()) == pytest.approx(64.0)


def test_hundreds_of_newcomers_take_nothing_of_the_first_owners_part() -> None:
    newcomers = {f"new-{number}": 1.0 for number in range(1000)}
    shares = fair_shares({"first": 3.0, **newcomers}, 3.0 * OWNERS)
    assert shares["first"] == 3.0
    assert sum(shares.values()) <= 3.0 * OWNERS + 1e-6
    assert fair_shares({**newcomers, "last": 3.0}, 3.0 * OWNERS)["last"] < 1.0


class Node:
    """Runs of so many ranks, and the CPU seconds that the diagnosis of each takes per update."""

    def __init__(self, costs: Mapping[Run, float], ranks: int = 8) -> None:
        self.costs, self.at = dict(costs), 0.0
        self.ranks = {run: range(ranks) for run in costs}
        self._clock = Clock(0.0)
        self.cpu_time = CpuTime(self._clock)

    def update(self, runs: Iterable[Run] = ()) -> set[Run]:
        """Update the runs that are not beyond the limits. Return those that are."""
        self.at += 1.0
        of: dict[str, list[Run]] = {}
        for run in runs or self.costs:
            of.setdefault(run[1], []).append(run)
        exceeding = self.cpu_time.exceeding(self.at, of, self.ranks)
        for run in (run for found in of.values() for run in found if run not in exceeding):
            with self.cpu_time.measured(run, len(self.ranks[run])):
                self._clock.advance(self.costs[run])
        return exceeding

    def spent(self, updates: int) -> float:
        """Return the mean CPU seconds of so many updates."""
        before = self._clock()
        for _ in range(updates):
            self.update()
        return (self._clock() - before) / updates


def test_runs_that_take_little_together_are_always_updated() -> None:
    node = Node({(f"run-{number}", str(number % 4)): 0.003 for number in range(16)})
    assert not any(node.update() for _ in range(1000))


def test_a_run_beyond_its_owners_share_is_not_updated_and_all_others_are() -> None:
    node = Node({HOSTILE: 3 * CPU_SECONDS, HONEST: CPU_SECONDS / 10})
    found = [node.update() for _ in range(1000)]
    assert all(HONEST not in beyond for beyond in found)
    assert found[100] == {HOSTILE}


def test_many_hostile_owners_take_no_more_than_the_limit_and_an_honest_one_is_always_updated() -> None:
    hostile = {(f"bomb-{number}", str(6000 + number % 4)): CPU_SECONDS / 8 for number in range(64)}
    node = Node({HONEST: CPU_SECONDS / 10, **hostile})
    node.spent(60)
    assert not any(HONEST in node.update() for _ in range(600))
    assert node.spent(1000) <= CPU_SECONDS


def test_an_owner_keeps_as_many_runs_as_fit_the_same_ones_each_time() -> None:
    hostile = {(f"bomb-{number}", "6666"): CPU_SECONDS / 4 for number in range(10)}
    node = Node(hostile)
    node.spent(60)
    judged = [hostile.keys() - node.update() for _ in range(100)]
    assert len(set(map(frozenset, judged))) == 1
    assert 2 <= len(judged[0]) <= 4


def test_a_run_that_took_too_much_is_tried_again_later() -> None:
    node = Node({HOSTILE: 3 * CPU_SECONDS, HONEST: CPU_SECONDS / 10})
    node.spent(60)
    assert node.update() == {HOSTILE}
    node.costs[HOSTILE] = CPU_SECONDS / 10
    node.at += 4 * HOLD_SECONDS
    for _ in range(5):
        node.at += HOLD_SECONDS
        node.update()
    assert node.update() == set()


def test_one_long_update_such_as_of_a_garbage_collection_does_not_count_in_full() -> None:
    others = {(f"run-{number}", str(number)): CPU_SECONDS / 10 for number in range(6)}
    node = Node({HONEST: CPU_SECONDS / 10, **others})
    node.spent(60)
    node.costs[HONEST] = 100 * CPU_SECONDS
    node.update()
    node.costs[HONEST] = CPU_SECONDS / 10
    assert not node.update()


def test_an_update_that_fails_is_measured_too() -> None:
    clock = Clock(0.0)
    cpu_time = CpuTime(clock)

    def fail() -> None:
        with cpu_time.measured(HOSTILE, 8):
            clock.advance(3 * CPU_SECONDS)
            raise ValueError("forged")

    for _ in range(100):
        with pytest.raises(ValueError, match="forged"):
            fail()
    assert cpu_time.exceeding(1.0, {"6666": [HOSTILE]}, {HOSTILE: range(8)}) == {HOSTILE}


def test_a_run_that_is_gone_is_forgotten() -> None:
    node = Node({HOSTILE: 3 * CPU_SECONDS})
    node.spent(60)
    assert node.update() == {HOSTILE}
    node.cpu_time.forget(())
    assert node.update() == set()


def test_a_new_run_is_not_taken_to_be_free() -> None:
    ranks = int(2 * CPU_SECONDS / RANK_CPU_SECONDS)
    assert Node({HOSTILE: 0.0}, ranks).update() == {HOSTILE}
