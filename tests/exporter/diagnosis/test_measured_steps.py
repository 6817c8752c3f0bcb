"""The account of a run's GPU time if only some steps are measured on the device."""

from __future__ import annotations

from collections import Counter

import pytest
from testing.readings import STEP, Change, Training, Trial, Work, counting, drift, spend

MINUTES = 1200.0


def account(training: Training, *changes: Change, seconds: float = MINUTES, every: int = 2) -> Counter[str]:
    """Train and return the ratio of the accounted time by cause."""
    trial = Trial(training, every=every).trained(seconds, drift, *changes)
    sums = Counter[str]()
    for verdict in trial.verdicts:
        sums.update(verdict.new_gpu_seconds)
    left = trial.verdicts[-1].undecided_seconds * len(training._ranks)
    assert sums.total() + left == pytest.approx(seconds * len(training._ranks), rel=0.01)
    return Counter({cause: one / sums.total() for cause, one in sums.items()})


def times(factor: float) -> Change:
    """Make steps this many times as long."""

    def change(_step: int, _rank: int, work: Work) -> None:
        work.update({phase: factor * work[phase] for phase in STEP})

    return change


def ratio(extra: float, every: int, step: float = 0.212) -> float:
    """Return the loss if all other ranks wait for `extra` seconds in each n-th step."""
    return extra / (extra + every * step)


@pytest.mark.parametrize(
    ("phase", "late", "extra", "every", "level", "ranks"),
    [
        ("other", 0, 1.0, 20, 3, 4),
        ("backward", 1, 4.0, 50, 2, 2),
        ("forward", 2, 2.0, 33, 3, 4),
    ],
)
def test_the_account_has_the_loss_to_a_rank_that_is_late_in_few_steps(phase, late, extra, every, level, ranks) -> None:
    late_rank = spend(phase, extra, late, every=every)
    found = account(Training(ranks, clock="device", level=level), late_rank)
    assert found["straggler"] == pytest.approx(ratio(extra, every) * (ranks - 1) / ranks, rel=0.1)
    assert found["unknown"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("ahead", [10, 50])
def test_the_account_is_the_same_if_the_host_runs_ahead(ahead) -> None:
    found = account(Training(2, clock="device", level=2, ahead=ahead), spend("backward", 2.0, 1, every=30))
    assert found["straggler"] == pytest.approx(ratio(2.0, 30) / 2, rel=0.1)


@pytest.mark.parametrize(("factor", "level", "seconds", "every"), [(0.1, 4, 300.0, 1), (90.0, 0, 7200.0, 5)])
def test_the_account_has_the_loss_in_steps_of_any_length(factor, level, seconds, every) -> None:
    """Steps of 20 ms, and of 18 s, which are all measured."""
    late = spend("backward", 0.4 * factor, 1, every=4)
    training = Training(2, clock="device", level=level, transfer=0.0)
    found = account(training, times(factor), late, seconds=seconds, every=every)
    assert found["straggler"] == pytest.approx(ratio(0.4, 4, 0.2) / 2, rel=0.1)


def late_from(first: int, factor: float) -> Change:
    """Make rank 1 late in every fourth step, and in every step from the first one given."""
    sometimes, always = (spend("backward", 0.1 * factor, 1, every=every) for every in (4, 1))
    return lambda step, rank, work: (always if step >= first else sometimes)(step, rank, work)


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("first", [10, 100], ids=["later in each step", "in some steps"])
def test_the_account_of_steps_of_a_minute_is_that_of_short_ones(clock: str, first: int) -> None:
    """Both have the same 25 steps."""
    short, long = (
        account(
            Training(4, clock=clock, transfer=0.01 * factor),
            *(times(factor), late_from(first, factor)),
            seconds=5.0 + 26 * 0.25 * factor,
            every=every,
        )
        for clock, factor, every in (("host", 20.0, 1), (clock, 300.0, 5))
    )
    for cause in ("straggler", "transfer"):
        assert long[cause] / long["none"] == pytest.approx(short[cause] / short["none"], rel=0.1)
    assert long["unknown"] == 0.0


def test_late_data_of_one_rank_alone_is_in_the_account() -> None:
    found = account(Training(1, clock="device", level=3), spend("data_wait", 2.0, every=20))
    assert found["data"] == pytest.approx(ratio(2.0, 20), rel=0.15)


def test_a_checkpoint_that_is_not_measured_is_no_late_rank() -> None:
    late = spend("other", 1.0, 1, every=20), spend("checkpoint", 20.0, 0, every=400)
    found = account(Training(2, clock="device", level=3), *late)
    whole = 400 * 0.212 + 20 * 1.0 + 20.0
    assert found["checkpoint"] == pytest.approx(20.0 / whole, rel=0.1)
    assert found["straggler"] == pytest.approx(20 * 1.0 / 2 / whole, rel=0.15)


def test_a_healthy_run_has_no_unknown_time() -> None:
    found = account(Training(4, clock="device", level=3, ahead=10), seconds=300.0)
    assert found["none"] > 0.9
    assert found["unknown"] == 0.0


def test_the_time_is_unknown_until_a_step_is_measured() -> None:
    """The host runs ahead and waits for its device, which computes."""
    training = Training(4, clock="device", level=3, ahead=10)
    unmeasured = lambda one: counting(one, device_steps=0.0, device_phases={})  # noqa: E731
    training.adjust = unmeasured
    trial = Trial(training).trained(60, drift)
    assert trial.verdicts[-1].lost["unknown"] > 0.8
    assert not any("device_wait" in verdict.lost for verdict in trial.verdicts)
    assert not any(verdict.new_gpu_seconds for verdict in trial.verdicts)
    training.adjust = lambda one: one
    trial.train(20, drift)
    assert trial.verdicts[-1].lost["none"] > 0.8
    counted = Counter[str]()
    for verdict in trial.verdicts:
        counted.update(verdict.new_gpu_seconds)
    assert counted["none"] > 0.8 * 4 * 70


class Switched(Training):
    """All steps are measured, or none."""

    is_on = True

    def _is_measured(self) -> bool:
        return self.is_on


def test_time_that_no_measured_step_explains_is_left_for_later() -> None:
    training, late = Switched(4, clock="device"), spend("other", 8.0, 1, every=100)
    trial = Trial(training).trained(60, drift)
    training.is_on = False
    trial.train(100, drift, late)
    sums = Counter[str]()
    for verdict in trial.verdicts:
        sums.update(verdict.new_gpu_seconds)
    assert sums["straggler"] < 0.05 * sums.total()
    assert trial.verdicts[-1].undecided_seconds > 20.0
    training.is_on = True
    trial.train(60, drift, late)
    waited = sum(verdict.new_gpu_seconds.get("straggler", 0.0) for verdict in trial.verdicts)
    assert waited == pytest.approx(3 * 8.0 * 160 / (100 * 0.212 + 8.0), rel=0.2)


def faster(_step: int, _rank: int, work: Work) -> None:
    """Make steps of 65 ms."""
    work.update({phase: 0.3 * work[phase] for phase in STEP})


@pytest.mark.parametrize("ahead", [1, 10, 50])
def test_a_slow_rank_is_found_as_soon_if_the_host_runs_ahead(ahead) -> None:
    trial = Trial(Training(4, clock="device", level=3, ahead=ahead, transfer=0.003)).trained(40, faster)
    assert not trial.kinds()
    seconds, finding = trial.find(faster, spend("backward", 0.03, 1))
    assert finding
    assert (finding.kind, finding.candidate.place.rank) == ("straggler", 1)
    assert seconds <= 12.0
