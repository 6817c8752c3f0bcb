"""Ranks that are late together: one finding names all of them, or none if the run is healthy."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from testing.readings import Adjust, Change, Training, Trial, Work, counting, drift, spend

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.late_set import late_sets
from rankscope_exporter.diagnosis.readings import GpuCounters, RankReading

SLOW = 0.04
"""Extra seconds of a step of 0.21 s: a sixth of it is lost."""


def found(trial: Trial) -> list[tuple[str, str, str]]:
    """Return kind, ranks and cause of each finding."""
    findings = {one.opened: one.candidate for verdict in trial.verdicts for one in verdict.findings}
    return [(one.kind, one.place.rank_label, one.cause) for one in findings.values()]


def newest(trial: Trial) -> Finding:
    (finding,) = trial.verdicts[-1].findings
    return finding


@pytest.mark.parametrize(
    ("ranks", "slow", "label"),
    [
        (2, [1], "1"),
        (4, [2, 3], "2-3"),
        (8, [0, 2, 5], "0,2,5"),
        (8, range(3, 8), "3-7"),
        (16, range(8), "0-7"),
        (64, range(32, 64), "32 ranks"),
    ],
)
def test_slow_ranks_are_one_finding_within_ten_seconds(ranks: int, slow: Collection[int], label: str) -> None:
    trial = Trial(Training(ranks)).trained(30, drift)
    trial.train(10, drift, spend("backward", SLOW, *slow))
    trial.train(20, drift, spend("backward", SLOW, *slow))
    assert found(trial) == [("straggler", label, "backward")]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_that_all_become_slow_are_not_late(ranks: int) -> None:
    trial = Trial(Training(ranks)).trained(30, drift).trained(60, drift, spend("backward", SLOW))
    assert not trial.kinds()


@pytest.mark.parametrize(("extra", "label"), [(0.2, "1-2"), (0.12, "1-2")])
def test_two_slow_ranks_of_three_are_found(extra: float, label: str) -> None:
    trial = Trial(Training(3)).trained(30, drift).trained(30, drift, spend("backward", extra, 1, 2))
    assert found(trial) == [("straggler", label, "backward")]


def test_two_slow_ranks_of_three_may_have_different_causes() -> None:
    faults = spend("backward", 0.12, 1), spend("data_wait", 0.12, 2)
    assert "straggler" in Trial(Training(3)).trained(60, drift).trained(120, drift, *faults).kinds()


@pytest.mark.parametrize(("ranks", "is_found"), [(8, True), (64, False)])
def test_one_fast_rank_of_many_is_no_fault_of_the_others(ranks: int, is_found: bool) -> None:
    """It wastes 6% of eight GPUs, and less than 1% of 64."""
    trial = Trial(Training(ranks)).trained(30, drift).trained(40, drift, spend("backward", 0.2, *range(1, ranks)))
    assert found(trial) == [("straggler", "1-7", "backward")] * is_found


def test_the_wait_for_one_slow_rank_is_not_hidden_by_one_fast_rank() -> None:
    waits = {0: 0.6, 1: 0.0, **dict.fromkeys(range(2, 1024), 0.12)}
    assert [*late_sets(waits, 0.07, 0.03)] == [(1,)]
    assert not [*late_sets({**waits, 1: 0.12}, 0.07, 0.03)]


def on_two_nodes(reading: RankReading) -> RankReading:
    return replace(reading, node=f"node-{'ab'[reading.rank // 8]}")


def test_a_slow_node_is_named_and_part_of_it_is_not() -> None:
    slow = spend("backward", SLOW, *range(8, 16))
    trial = Trial(Training(16, adjust=on_two_nodes)).trained(30, drift).trained(20, drift, slow)
    place = newest(trial).candidate.place
    assert (place.place, place.node, place.gpu, place.rank_label) == ("node node-b", "node-b", "", "8-15")
    trial = Trial(Training(16, adjust=on_two_nodes)).trained(30, drift)
    place = newest(trial.trained(20, drift, spend("backward", SLOW, *range(9, 16)))).candidate.place
    assert (place.place, place.node) == ("", "node-b")


def test_ranks_that_share_a_slow_gpu_are_named_by_it() -> None:
    training = Training(8, adjust=lambda one: replace(one, uuid=f"GPU-{one.rank // 2}"))
    trial = Trial(training).trained(30, drift).trained(20, drift, spend("backward", SLOW, 2, 3))
    place = newest(trial).candidate.place
    assert (place.place, place.uuid, place.rank_label) == ("GPU 2", "GPU-1", "2-3")


def in_context(size: int, throttled: Collection[int] = ()) -> Adjust:
    """Return ranks with their place in groups of context parallelism; some of them with throttled GPUs."""

    def change(one: RankReading) -> RankReading:
        known = replace(one, coordinates={"cp": one.rank % size, "dp": one.rank // size})
        gpu = GpuCounters(one.at, {"sw_thermal_slowdown": 0.9 * one.at}, 0.7 * one.at)
        return counting(known, gpu=gpu) if one.rank in throttled else known

    return change


def test_work_that_the_layout_divides_unevenly_is_not_blamed_on_gpus() -> None:
    trial = Trial(Training(8, adjust=in_context(4))).trained(60, drift, spend("forward", 0.05, 3, 7))
    place = newest(trial).candidate.place
    assert (place.place, place.rank_label, place.gpu, place.uuid) == ("context 3", "3,7", "", "")


@pytest.mark.parametrize(
    ("throttled", "healthy", "place", "uuid"),
    [((), 0, "context 3", ""), ((3,), 0, "GPU 3", "GPU-3"), ((), 40, "GPU 3", "GPU-3")],
    ids=["from the start", "throttled", "later"],
)
def test_a_gpu_with_its_own_place_in_the_layout_is_blamed_only_with_evidence_or_later(
    throttled: Collection[int], healthy: float, place: str, uuid: str
) -> None:
    trial = Trial(Training(4, adjust=in_context(4, throttled))).trained(healthy + 1, drift)
    named = newest(trial.trained(40, drift, spend("forward", 0.06, 3))).candidate.place
    assert (named.place, named.uuid, named.also) == (place, uuid, "GPU 3" if uuid == "" else "context 3")


@pytest.mark.parametrize("replicas", [1, 2])
def test_steady_levels_name_only_the_place_with_most_work(replicas: int) -> None:
    """A causal mask gives the waits 3:2:1:0."""
    levels = [spend("forward", 0.03 * place, *range(place, 4 * replicas, 4)) for place in range(4)]
    trial = Trial(Training(4 * replicas, adjust=in_context(4))).trained(120, drift, *levels)
    (finding,) = {one.opened: one for verdict in trial.verdicts for one in verdict.findings}.values()
    assert finding.candidate.place.place == "context 3"


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_each_of_three_levels_is_a_finding(ratio: float) -> None:
    """The two late levels are nearer to each other in the second case."""
    levels = spend("backward", 0.08, 4, 5), spend("backward", 0.08 * (1.0 + ratio), 6, 7)
    trial = Trial(Training(8)).trained(30, drift).trained(40, drift, *levels)
    named = {rank for verdict in trial.verdicts for one in verdict.findings for rank in one.candidate.place.ranks}
    assert trial.kinds() == {"straggler"}
    assert named == {4, 5, 6, 7}
    assert len(found(trial)) <= 2


def test_two_faults_at_once_are_two_findings() -> None:
    faults = spend("backward", 0.06, 2), spend("data_wait", 0.12, 5, 6)
    trial = Trial(Training(8)).trained(60, drift).trained(60, drift, *faults)
    assert sorted(found(trial)) == [("straggler", "2", "backward"), ("straggler", "5-6", "data_wait")]


@pytest.mark.parametrize(("first", "second"), [(0.06, 0.16), (0.16, 0.08)])
def test_a_rank_that_becomes_late_later_is_a_finding_of_its_own(first: float, second: float) -> None:
    one, other = spend("backward", first, 1), spend("other", second, 4)
    trial = Trial(Training(8)).trained(30, drift).trained(40, drift, one).trained(60, drift, one, other)
    assert found(trial) == [("straggler", "1", "backward"), ("straggler", "4", "other")]
    assert len(trial.verdicts[-1].findings) == 2


def test_a_rank_that_recovers_leaves_the_evidence_and_not_the_label() -> None:
    trial = Trial(Training(8)).trained(30, drift).trained(40, drift, spend("backward", 0.12, 4, 5, 6, 7))
    before = newest(trial)
    after = newest(trial.trained(60, drift, spend("backward", 0.12, 4, 5, 6)))
    assert (after.opened, after.candidate.place) == (before.opened, before.candidate.place)
    assert after.candidate.ratio == pytest.approx(0.12 / 0.33, abs=0.02)
    assert after.candidate.evidence["lag"] == pytest.approx(0.12 / 0.33, abs=0.02)
    assert not trial.train(60, drift).findings


def test_ranks_that_are_late_one_after_the_other_are_no_set() -> None:
    trial = Trial(Training(8)).trained(30, drift)
    for rank in (0, 1, 2, 0, 1, 2):
        trial.train(5, drift, spend("other", 0.12, rank))
    assert not any(kind == "straggler" and not label.isdecimal() for kind, label, _ in found(trial))


def in_turn(*ranks: int) -> Change:
    def change(step: int, rank: int, work: Work) -> None:
        if rank == ranks[step % len(ranks)]:
            work["backward"] += 0.12

    return change


def test_few_ranks_that_are_late_in_turn_are_named_from_the_start() -> None:
    trial = Trial(Training(8)).trained(120, in_turn(1, 3, 5))
    assert found(trial) == [("rotating_straggler", "1,3,5", "uneven_work")]


def test_all_ranks_that_are_late_in_turn_from_the_start_have_uneven_work() -> None:
    trial = Trial(Training(8)).trained(120, in_turn(*range(8)))
    assert not trial.kinds()
    assert ("rotating_straggler", "usual") in {(one.candidate.kind, one.lacks) for one in trial.verdicts[-1].pending}


@pytest.mark.parametrize(("ranks", "phase"), [(8, "forward"), (8, "other"), (8, "rollout"), (16, "forward")])
def test_uneven_work_from_the_start_is_no_finding_in_any_phase(ranks: int, phase: str) -> None:
    draw = random.Random(1)

    def uneven(_step: int, _rank: int, work: Work) -> None:
        work[phase] = work.get(phase, 0.0) + 0.1 * math.exp(draw.gauss(0, 0.5))

    assert not Trial(Training(ranks)).trained(200, uneven).kinds()


def test_two_ranks_with_uneven_work_among_even_ones_are_named() -> None:
    draw = random.Random(1)

    def noisy(_step: int, rank: int, work: Work) -> None:
        work["backward"] += 0.15 * math.exp(draw.gauss(0, 0.7)) if rank in (1, 5) else 0.0

    trial = Trial(Training(8)).trained(30, drift).trained(120, drift, noisy)
    assert {label for _, label, _ in found(trial)} == {"1,5"}


def test_uneven_work_with_moderately_long_steps_is_not_called_spikes() -> None:
    """Steps take 0.24 s or 0.51 s: 2.1 times the median. Uneven work alerts only beyond `uneven_allowance`."""
    draw = random.Random(2)

    def uneven(_step: int, _rank: int, work: Work) -> None:
        work["backward"] += 0.03 + (0.27 if draw.random() < 0.05 else 0.0)

    assert not Trial(Training(4)).trained(100, uneven).kinds()
