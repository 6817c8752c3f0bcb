"""State detectors: slow start-up, checkpoints, unused GPUs, training on the CPU, collapsed loss scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testing.readings import Adjust, Change, Training, Trial, counting, spend, window

from rankscope_exporter.diagnosis.detectors import STATES
from rankscope_exporter.diagnosis.detectors.state import Past
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading, RankReading

HOUR = 3600.0


def found(*changes: Change, adjust: Adjust = lambda one: one, past: Past | None = None) -> dict[str, Candidate]:
    """Return the candidates for two ranks over 20 s, by kind."""
    training = Training(2, adjust=adjust)
    one = window(training, *changes)
    return {candidate.kind: candidate for detector in STATES for candidate in detector.detect(one, past or Past())}


def test_a_healthy_run_is_in_none_of_these_states() -> None:
    assert not found()


def test_a_start_up_is_slow_after_ten_minutes_without_a_step() -> None:
    trial = Trial(Training(2, startup=2000.0))
    verdict = trial.train(400)
    assert [(one.candidate.kind, one.lacks) for one in verdict.pending if one.candidate.kind != "hang"] == [
        ("slow_startup", "time")
    ]
    trial.train(180)
    assert "slow_startup" not in trial.kinds()
    assert [finding.kind for finding in trial.train(25).findings] == ["slow_startup"]
    trial.train(1400)
    assert not trial.train(60).findings


@pytest.mark.parametrize(("ratio", "is_slow"), [(0.051, True), (0.05, False), (0.0, False)])
def test_checkpoints_are_slow_above_a_ratio_of_the_time(ratio, is_slow) -> None:
    assert ("slow_checkpoint" in found(past=Past(checkpoint_ratio=ratio))) == is_slow


@pytest.mark.parametrize(("every", "is_slow"), [(25, True), (1000, False)], ids=["each minute", "each half hour"])
def test_checkpoints_that_take_six_seconds_are_slow_only_if_there_are_many(every, is_slow) -> None:
    trial = Trial(Training(2), every=15)
    trial.train(HOUR, spend("backward", 1.8), spend("checkpoint", 6.0, every=every))
    assert ("slow_checkpoint" in trial.kinds()) == is_slow


def aged(began: float, checkpoint: float | None) -> Adjust:
    """Return ranks that began, and whose rank 1 wrote a checkpoint, these hours ago."""

    def change(one: RankReading) -> RankReading:
        last = None if checkpoint is None or one.rank != 1 else one.at - HOUR * checkpoint
        return replace(one, began=one.at // 1e9 - HOUR * began, last_checkpoint=last)

    return change


@pytest.mark.parametrize(("seconds", "findings"), [(120.0, 1), (30.0, 0)])
def test_checkpoints_each_twenty_minutes_that_are_slow_are_one_finding(seconds: float, findings: int) -> None:
    """An hour has two of them, or three: their ratio exceeds the limit and falls below it, again and again."""
    trial = Trial(Training(1), every=20)
    longer = [spend("other", 20.0), spend("checkpoint", seconds, every=round((1200.0 - seconds) / 20.2))]
    trial.train(3 * HOUR, *longer)
    assert len(trial.opened("slow_checkpoint")) == findings


def test_a_long_start_up_does_not_count_as_time_without_a_checkpoint() -> None:
    def started(hours: float) -> Callable[[RankReading], RankReading]:
        long = hours * 3600.0
        return lambda one: counting(
            replace(one, began=one.at - 5 * 3600.0, last_checkpoint=None),
            phases={**one.counters.phases, "startup": long},
        )

    assert "checkpoint_overdue" not in found(adjust=started(4.9))
    assert found(adjust=started(0.1))["checkpoint_overdue"].cause == "never"


@pytest.mark.parametrize(
    ("began", "checkpoint", "cause"),
    [(9.0, 5.0, "overdue"), (9.0, None, "never"), (9.0, 0.5, ""), (1.0, None, ""), (1.0, 9.0, "")],
)
def test_a_checkpoint_is_overdue_after_four_hours_of_this_run(began, checkpoint, cause) -> None:
    """A resumed run can only lose the work since it was resumed."""
    candidate = found(adjust=aged(began, checkpoint)).get("checkpoint_overdue")
    assert (candidate.cause if candidate else "") == cause
    if candidate and candidate.lasted is not None:
        assert candidate.lasted > candidate.needed == 4 * HOUR


def using(busy: float, memory: float | None) -> Adjust:
    gpu = None if memory is None else GpuReading("0", memory, 1, 0.0)
    return lambda one: counting(replace(one, gpu=gpu), gpu=GpuCounters(busy * one.at))


@pytest.mark.parametrize(
    ("memory", "cause"), [(0.9, "memory_bound"), (0.3, "batch_too_small"), (0.65, "unknown"), (None, "unknown")]
)
def test_a_run_that_computes_with_idle_gpus_has_low_utilization(memory, cause) -> None:
    candidate = found(adjust=using(0.3, memory))["low_utilization"]
    assert candidate.cause == cause
    assert candidate.ratio == pytest.approx(0.7, abs=0.01)
    assert candidate.needed == 900.0


def test_gpus_that_are_idle_for_another_cause_or_unknown_have_no_low_utilization() -> None:
    assert "low_utilization" not in found(adjust=using(0.6, 0.3))
    assert "low_utilization" not in found(spend("data_wait", 0.3), adjust=using(0.3, 0.3))
    assert "low_utilization" not in found(adjust=lambda one: counting(one, gpu=GpuCounters()))


def test_one_idle_gpu_of_two_is_no_low_utilization_of_the_run() -> None:
    used, unused = using(0.9, 0.3), using(0.0, 0.3)
    assert "low_utilization" not in found(adjust=lambda one: (used if one.rank else unused)(one))
    assert "low_utilization" in found(adjust=lambda one: (using(0.4, 0.3) if one.rank else unused)(one))


def test_low_utilization_is_found_after_a_quarter_of_an_hour() -> None:
    trial = Trial(Training(1))
    trial.training.adjust = using(0.3, 0.3)
    trial.train(890)
    assert not trial.kinds()
    trial.train(60)
    assert trial.kinds() == {"low_utilization"}


def idle(seconds: float | None, memory: float | None) -> Adjust:
    return lambda one: replace(one, gpu=GpuReading("1", memory, 1, seconds if one.rank == 1 else 0.0))


def test_a_rank_that_makes_steps_on_an_idle_gpu_trains_on_the_cpu() -> None:
    candidate = found(adjust=idle(90.0, 0.01))["cpu_fallback"]
    assert (candidate.place.rank, candidate.place.gpu) == (1, "1")
    assert candidate.lasted == pytest.approx(25.0), "the rank has trained for 25 of the 90 seconds"


@pytest.mark.parametrize("idle_seconds", [90.0, 600.0])
def test_a_gpu_that_was_idle_while_its_rank_started_is_no_finding_at_the_first_steps(idle_seconds: float) -> None:
    trial = Trial()
    trial.training.adjust = idle(idle_seconds, 0.01)
    trial.train(55)
    assert not trial.kinds()
    trial.train(15)
    assert trial.kinds() == {"cpu_fallback"}


@pytest.mark.parametrize(
    "adjust",
    [idle(90.0, 0.3), idle(2.0, 0.01), idle(None, 0.01), lambda one: replace(one, gpu=None)],
    ids=["GPU has data", "GPU is busy", "unknown", "no GPU"],
)
def test_a_rank_that_uses_its_gpu_or_has_none_does_not_train_on_the_cpu(adjust) -> None:
    assert "cpu_fallback" not in found(adjust=adjust)


def test_a_rank_that_makes_no_steps_does_not_train_on_the_cpu() -> None:
    assert "cpu_fallback" not in found(adjust=lambda one: counting(idle(90.0, 0.01)(one), steps=9.0))


@pytest.mark.parametrize(
    ("scale", "past", "has_collapsed"),
    [
        (0.5, Past(highest_amp_scale=65536.0, amp_skips=20.0), True),
        (64.0, Past(highest_amp_scale=65536.0, amp_skips=20.0), True),
        (0.0, Past(highest_amp_scale=0.0, amp_skips=20.0), True),
        (8192.0, Past(highest_amp_scale=65536.0, amp_skips=20.0), False),
        (64.0, Past(highest_amp_scale=65536.0, amp_skips=5.0), False),
        (None, Past(highest_amp_scale=65536.0, amp_skips=20.0), False),
    ],
    ids=["below 1", "far below", "to 0", "some halvings", "few skips", "no scaler"],
)
def test_a_loss_scale_collapses_with_many_skipped_steps(scale, past, has_collapsed) -> None:
    seen = found(adjust=lambda one: replace(one, amp_scale=scale), past=past)
    assert ("loss_scale_collapse" in seen) == has_collapsed
