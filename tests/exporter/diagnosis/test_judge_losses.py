"""Losses that were found too late, in the wrong place or in healthy runs: one test for each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from testing.readings import RUN, SLOW, Change, Training, Trial, Work, counting, drift, spend

from rankscope_exporter.diagnosis.facts import compare
from rankscope_exporter.diagnosis.readings import AlignedCounters, CollectiveCounters, GpuCounters, RankReading


@pytest.mark.parametrize("ranks", [4, 8])
def test_much_garbage_collection_in_turn_is_found_while_it_lasts(ranks) -> None:
    """It exceeds the shortest tier, in which the collectors may have run in turn by chance."""
    trial = Trial(Training(ranks, adjust=lambda one: counting(one, gc_seconds=0.08 * one.at))).trained(60)
    verdict = trial.train(60, lambda step, rank, work: work.update(backward=0.27 if step % ranks == rank else 0.12))
    assert [(one.kind, one.candidate.cause) for one in verdict.findings] == [("rotating_straggler", "gc")]


@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_a_steady_straggler_of_two_is_found_after_a_dozen_steps(seconds) -> None:
    slow = spend("backward", 0.5 * seconds, 1)
    trial = Trial(Training(2)).trained(60, spend("forward", seconds))
    assert trial.find(drift, spend("forward", seconds), slow)[0] <= max(10.0, 16 * (0.21 + 1.5 * seconds))


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_a_common_pipeline_has_no_bubble_finding_in_its_first_minutes(micro_batches) -> None:
    stages = micro_batches
    bubble = (stages - 1) / (micro_batches + stages - 1)
    staged = Training(
        stages, transfer=0.2 / (1 - bubble) * bubble, startup=60.0, adjust=lambda one: in_stages(one, micro_batches)
    )
    assert not Trial(staged).trained(200, drift).kinds()


def in_stages(one: RankReading, micro_batches: int = 8) -> RankReading:
    """Return the reading of a rank that alone is its stage: nothing is compared."""
    changed = replace(one, stage=one.rank)
    return counting(changed, micro_steps=micro_batches * one.counters.steps, aligned=AlignedCounters())


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
def test_a_stage_that_evaluates_alone_is_not_a_slow_stage(phase) -> None:
    trial = Trial(Training(4, adjust=in_stages)).trained(60, drift, spend(phase, 2.5, 3, every=10))
    assert "stage_imbalance" not in trial.kinds()


def test_a_finding_goes_on_while_a_gradient_scaler_skips_all_steps() -> None:
    """Skipped steps are not compared."""
    kept: dict[int, RankReading] = {}

    def skip(one: RankReading) -> RankReading:
        before = kept.setdefault(one.rank, one).counters
        if one.at <= 90.0:
            kept[one.rank] = one
            return one
        skipped = one.counters.steps - before.steps
        return counting(one, steps=before.steps, aligned=before.aligned, amp_skipped_steps=skipped)

    trial = Trial(Training(4, adjust=skip)).trained(60).trained(30, SLOW)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["straggler"]
    assert [one.kind for one in trial.train(40, SLOW).findings] == ["straggler"]


def test_the_wait_for_late_ranks_is_not_lost_to_small_collectives() -> None:
    """Four small collectives take 1 ms together; the first of them waits for the ranks with more work."""
    draw = random.Random(1)

    def small(one: RankReading) -> RankReading:
        steps, waited = one.counters.steps, one.counters.phases.get("collective_wait", 0.0)
        calls = {"ddp_all_reduce": steps, "all_reduce": 4 * steps}
        moved = {"ddp_all_reduce": 1e8 * steps, "all_reduce": 32 * steps}
        return counting(one, collectives=CollectiveCounters(calls, moved, {"all_reduce": waited}))

    def uneven(_step: int, _rank: int, work: Work) -> None:
        work["forward"] = max(draw.gauss(0.16, 0.05), 0.01)

    assert not Trial(Training(4, transfer=0.001, adjust=small)).trained(200, uneven).kinds()


def test_the_evidence_follows_the_ratio() -> None:
    trial = Trial().trained(60).trained(60, spend("backward", 0.05, 1))
    (finding,) = trial.train(60, spend("backward", 0.6, 1)).findings
    assert finding.candidate.evidence["lag"] == pytest.approx(finding.candidate.ratio, abs=0.05)


def test_a_reason_that_is_over_is_no_longer_in_the_evidence() -> None:
    """The rank is late for the same phase, but its GPU is no longer throttled."""

    def throttled(one: RankReading) -> RankReading:
        seconds = min(one.at, 120.0) if one.rank == 1 else 0.0
        return counting(one, gpu=GpuCounters(0.9 * one.at, {"hw_thermal_slowdown": seconds}))

    trial = Trial(Training(4, adjust=throttled)).trained(60, drift)
    (finding,) = trial.train(50, drift, SLOW).findings
    assert (finding.candidate.cause, finding.candidate.evidence["throttled"]) == ("throttled", pytest.approx(1.0))
    (finding,) = trial.train(60, drift, SLOW).findings
    assert finding.candidate.cause == "throttled"
    assert finding.candidate.evidence.keys() == {"lag", "wait", "group_wait"}


LONGEST_GAP = 4
"""The level at which steps of 0.21 s are measured each 3.4 s, which the hook never exceeds with up to 300 marks."""


@pytest.mark.parametrize("level", [2, LONGEST_GAP])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (spend("backward", 0.12, 1), "straggler"),
        (spend("backward", 0.3, 1), "straggler"),
        (spend("data_wait", 0.12), "data"),
        (spend("h2d_copy", 0.12), "copies"),
    ],
    ids=["straggler", "slower straggler", "data", "copies"],
)
def test_a_loss_is_found_within_a_dozen_measured_steps(level: int, change: Change, kind: str) -> None:
    """Steps with 100 marks and more, such as FSDP's, are not all measured on the device."""
    trial = Trial(Training(4, clock="device", level=level)).trained(100, drift)
    assert not trial.kinds()
    trial.train(12 * 2**level * (0.3 + 0.21), drift, change)
    assert trial.kinds() == {kind}


def test_a_straggler_is_found_on_the_device_if_no_step_can_be_compared() -> None:
    """A rank counts its steps or collectives differently from the others."""
    training = Training(4, clock="device", adjust=lambda one: counting(one, aligned=AlignedCounters()))
    assert Trial(training).trained(60, drift).find(drift, SLOW)[0] <= 10.0


def test_the_lag_is_unknown_between_measured_steps() -> None:
    *_, (_, before) = (training := Training(4, clock="device", level=LONGEST_GAP)).train(60)
    lags = []
    for _, now in training.train(20, spend("backward", 0.3, 1)):
        measured = before[0].counters.aligned.steps < now[0].counters.aligned.steps
        lags.append((measured, [one.lag for one in compare(RUN, before, now).ranks]))
        before = now
    assert {measured for measured, _ in lags} == {True, False}
    assert all((lag is not None) == measured for measured, found in lags for lag in found)


@pytest.mark.parametrize("slow", [range(5), range(7)])
def test_most_ranks_of_eight_do_not_slow_each_other_down_in_turn(slow) -> None:
    trial = Trial(Training(8)).trained(60, drift)
    assert "rotating_straggler" not in trial.trained(120, drift, spend("backward", 0.12, *slow)).kinds()


@pytest.mark.parametrize(("every", "seconds"), [(3, 0.3), (5, 0.5), (10, 1.0)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_is_late_in_each_third_step_or_less_often_is_found(ranks, every, seconds) -> None:
    """It logs or saves. These steps are two to six times as long as the others."""
    trial = Trial(Training(ranks)).trained(60, drift)
    after, finding = trial.find(drift, spend("backward", seconds, 1, every=every))
    assert finding
    assert (finding.kind, finding.candidate.place.rank) == ("straggler", 1)
    assert after <= 90.0
