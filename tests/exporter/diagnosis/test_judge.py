"""The judge of a run: when candidates become findings, what stays fixed while they last, and when they end."""

from __future__ import annotations

import pytest
from testing.readings import SLOW, STEP, Change, Training, Trial, Work, counting, drift, spend

from rankscope_exporter.diagnosis.readings import AlignedCounters, GpuCounters, RankReading


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_straggler_is_found_within_ten_seconds(ranks, clock) -> None:
    trial = Trial(Training(ranks, clock=clock)).trained(120)
    assert trial.find(SLOW)[0] <= 10
    (finding,) = trial.verdicts[-1].findings
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.rank) == ("straggler", "backward", 1)
    assert finding.since == pytest.approx(120.0, abs=1.0)
    assert finding.severity == "warning"


@pytest.mark.parametrize(("seconds", "least", "most", "every"), [(0.03, 30, 60, 1), (0.019, 800, 1000, 5)])
def test_smaller_losses_take_longer(seconds, least, most, every) -> None:
    trial = Trial(Training(2), every=every).trained(60)
    assert least <= trial.find(spend("backward", seconds, 1))[0] <= most


def test_a_loss_below_the_limit_is_never_found() -> None:
    trial = Trial(Training(2), every=5).trained(1500, spend("backward", 0.012, 1))
    assert not trial.kinds()


@pytest.mark.parametrize("ranks", [(), (0,)], ids=["all ranks", "only rank 0"])
@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
def test_planned_phases_do_not_delay_the_finding_of_a_straggler(phase, ranks) -> None:
    """The lag is 55% of each step, and every 50 steps there is a planned phase of three seconds."""
    planned, straggler = spend(phase, 3.0, *ranks, every=50), spend("backward", 0.25, 1)
    trial = Trial().trained(120, planned)
    assert not trial.kinds()
    assert trial.find(planned, straggler)[0] <= 12 + 3
    assert trial.opened()[0].candidate.cause == "backward"


def accumulation(step: int, _rank: int, work: Work) -> None:
    work["forward"], work["backward"] = 8 * work["forward"], 8 * work["backward"]


def collections(step: int, rank: int, work: Work) -> None:
    work["backward"] += 0.25 if (step + 13 * rank) % 60 == 0 else 0.0


def longer_sequences(step: int, _rank: int, work: Work) -> None:
    work["backward"] *= 1.0 + (step % 100) / 50


DECOYS: dict[str, Change] = {
    "drift of 2%": drift,
    "gradient accumulation": accumulation,
    "garbage collections": collections,
    "longer sequences": longer_sequences,
    "an evaluation every 50 steps": spend("evaluation", 2.0, every=50),
    "a checkpoint of rank 0 only": spend("checkpoint", 2.0, 0, every=500),
    "a pause of one rank every 300 steps": spend("other", 12.0, 2, every=300),
}


@pytest.mark.parametrize("decoy", DECOYS)
@pytest.mark.parametrize("clock", ["host", "device"])
def test_healthy_runs_have_no_findings(clock, decoy) -> None:
    trial = Trial(Training(4, clock=clock), every=2).trained(300, DECOYS[decoy])
    assert not trial.kinds()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_slow_warm_up_and_a_planned_restart_are_not_findings(ranks) -> None:
    trial = Trial(Training(ranks, startup=90.0)).trained(100)
    trial.train(3, spend("backward", 4.0))
    trial.train(60)
    trial.training.restart()
    trial.train(200)
    assert not trial.kinds()


def test_a_single_long_pause_is_not_a_straggler() -> None:
    trial = Trial().trained(60)
    trial.train(1, spend("other", 25.0, 1))
    trial.train(120)
    assert "straggler" not in trial.kinds()


def test_a_lag_that_grows_becomes_critical_once_and_stays_one_finding() -> None:
    trial = Trial(every=5)
    for seconds in (0.025, 0.05, 0.1, 0.2, 0.35, 0.1, 0.05):
        trial.train(150, spend("backward", seconds, 1))
    findings = [finding for verdict in trial.verdicts for finding in verdict.findings]
    severities = [finding.severity for finding in findings]
    assert len({finding.opened for finding in findings}) == 1
    assert severities == sorted(severities, reverse=True)
    assert set(severities) == {"warning", "critical"}
    first_critical = next(finding for finding in findings if finding.severity == "critical")
    assert first_critical.candidate.ratio > 0.5


def test_the_ratio_follows_the_loss_and_the_cause_stays_fixed_while_it_explains_a_part() -> None:
    trial = Trial().trained(30, SLOW)
    assert trial.verdicts[-1].findings[0].candidate.ratio == pytest.approx(0.12 / 0.33, abs=0.03)
    trial.train(30, SLOW, spend("data_wait", 0.2, 1))
    (finding,) = trial.verdicts[-1].findings
    assert finding.candidate.ratio == pytest.approx(0.32 / 0.53, abs=0.03)
    assert finding.candidate.cause == "backward"


def test_a_critical_loss_is_critical_from_the_start() -> None:
    trial = Trial().trained(60)
    trial.train(20, spend("backward", 0.5, 1))
    assert [finding.severity for finding in trial.opened()] == ["critical"]


def test_a_finding_ends_some_seconds_after_its_loss() -> None:
    trial = Trial().trained(60, SLOW)
    trial.train(20)
    assert trial.verdicts[-1].findings, "the loss has to be gone for 20 s"
    assert not trial.train(15).findings


def test_a_loss_that_returns_soon_is_one_finding() -> None:
    trial = Trial()
    for _ in range(5):
        trial.train(40, SLOW)
        trial.train(15)
    assert len(trial.opened()) == 1


def test_a_loss_at_the_limit_does_not_flap() -> None:
    trial = Trial(Training(2)).trained(100, spend("backward", 0.03, 1))
    for _ in range(10):
        trial.train(20, spend("backward", 0.014, 1))
        trial.train(20, spend("backward", 0.02, 1))
    assert len(trial.opened()) <= 1


def test_missed_polls_change_nothing() -> None:
    trial = Trial().trained(60)
    seen = [moment for moment in trial.training.train(120, SLOW) if moment[0] % 20 >= 4]
    trial.verdicts += [trial.judge.update(*moment) for moment in seen]
    (finding,) = trial.opened()
    assert finding.opened <= 60 + 15
    assert trial.verdicts[-1].findings


def test_a_restarted_run_has_no_open_findings() -> None:
    trial = Trial().trained(60, SLOW)
    trial.training.restart()
    assert not trial.train(1).findings
    trial.train(120)
    assert len(trial.opened()) == 1


def test_the_same_fault_after_a_restart_is_another_finding() -> None:
    trial = Trial().trained(60, SLOW)
    trial.training.restart()
    trial.train(60, SLOW)
    assert len(trial.opened()) == 2


def test_counters_that_decrease_are_not_a_finding() -> None:
    """The exporter's counters start at 0 after a restart, while the rank's continue."""
    trial = Trial().trained(60)
    trial.training.adjust = lambda one: counting(one, aligned=AlignedCounters()) if one.at < 65 else one
    trial.train(60)
    assert not trial.kinds()


def test_a_new_candidate_is_shown_as_pending_with_the_reason() -> None:
    trial = Trial().trained(60)
    (pending,) = trial.train(5, spend("backward", 0.5, 1)).pending
    assert (pending.candidate.kind, pending.candidate.place.rank, pending.lacks) == ("straggler", 1, "time")
    trial = Trial(Training(startup=1.0)).trained(1)
    (pending,) = trial.train(8, spend("backward", 4.0, 1)).pending
    assert pending.lacks == "steps"


def test_lost_gpu_time_is_counted_once() -> None:
    trial = Trial().trained(100, SLOW)
    lost = sum(verdict.new_gpu_seconds.get("straggler", 0.0) for verdict in trial.verdicts)
    assert lost == pytest.approx(3 * 0.12 / 0.33 * 95, rel=0.1)
    assert sum(sum(verdict.new_gpu_seconds.values()) for verdict in trial.verdicts) == pytest.approx(4 * 95, rel=0.1)


def test_a_slow_network_is_found_with_and_without_a_baseline() -> None:
    trial = Trial(Training(4, transfer=0.02), every=5).trained(900)
    trial.training._transfer, trial.every = 0.06, 1
    assert trial.find()[0] <= 60
    assert trial.opened("network")[0].baseline == "known"
    trial = Trial(Training(4, transfer=0.2))
    assert trial.find()[0] <= 30
    assert trial.opened("network")[0].baseline == "unknown"


def test_first_steps_with_less_transfer_than_usual_are_no_baseline() -> None:
    trial = Trial(Training(4, transfer=0.0)).trained(22)
    trial.training._transfer, trial.every = 0.06, 5
    trial.train(900)
    assert not trial.kinds()


class FewMeasuredSteps:
    """One of `every` steps is measured on the device, and the host reads a value in each step. Changes readings."""

    def __init__(self, every: int) -> None:
        self.every, self.is_dry, self.is_stopped = every, False, False
        self._dry, self._steps = 0.0, 0

    @property
    def seconds(self) -> float:
        """The seconds between two measured steps, while no step is slow."""
        return self.every * (sum(STEP.values()) + 0.01)

    def __call__(self, one: RankReading) -> RankReading:
        steps, phases = one.counters.steps, dict(one.counters.phases)
        measured = self._steps if self.is_stopped else int(steps / self.every)
        self._dry += self.is_dry * 0.5 * STEP["backward"] * (measured - self._steps)
        self._steps = measured
        phases["device_wait"] = waited = min(0.1 * steps, phases.get("backward", 0.0))
        phases["backward"] = phases.get("backward", 0.0) - waited
        return counting(
            one, phases=phases, device_steps=float(measured), device_waits=steps,
            device_phases={phase: seconds * measured for phase, seconds in STEP.items()},
            device_dry={"backward": self._dry}, gpu=GpuCounters(0.5 * one.at, {}, one.at),
        )  # fmt: skip


@pytest.mark.parametrize("every", [1, 8, 32, 128])
def test_a_loss_on_the_device_is_found_and_ends_however_few_steps_are_measured(every) -> None:
    few = FewMeasuredSteps(every)
    trial = Trial(Training(1, adjust=few)).trained(120)
    assert not trial.kinds()
    few.is_dry = True
    assert trial.find()[0] <= 10 + 8 * few.seconds
    trial.train(300)
    few.is_dry = False
    assert not trial.train(30 + few.seconds).findings
    assert len(trial.opened("device_reads")) == 1


def test_the_device_of_one_rank_of_two_that_runs_dry_is_no_loss_of_the_whole_run() -> None:
    """A host that pauses, or lacks CPU time, leaves its device dry: that rank is late."""
    of_rank = FewMeasuredSteps(1), FewMeasuredSteps(1)
    trial = Trial(Training(2, adjust=lambda one: of_rank[one.rank](one))).trained(120)
    of_rank[1].is_dry = True
    trial.train(120)
    assert "device_reads" not in trial.kinds()
    of_rank[0].is_dry = True
    trial.train(60)
    assert "device_reads" in trial.kinds()


def test_one_measured_step_is_not_enough_for_a_finding() -> None:
    few = FewMeasuredSteps(32)
    trial = Trial(Training(1, adjust=few)).trained(120)
    for _ in range(5):
        few.is_dry = True
        trial.train(few.seconds)
        few.is_dry = False
        trial.train(60)
    assert not trial.kinds()


def test_a_loss_on_the_host_is_found_as_soon_with_few_measured_steps() -> None:
    trial = Trial(Training(1, adjust=FewMeasuredSteps(32))).trained(120)
    assert trial.find(spend("data_wait", 0.12))[0] <= 10


def test_late_data_is_found_while_each_step_is_skipped() -> None:
    """The gradient scaler of each rank skips all steps after the first minute, so that none is compared."""
    last: dict[int, RankReading] = {}

    def skip(reading: RankReading) -> RankReading:
        now, kept = reading.counters, last.setdefault(reading.rank, reading)
        if reading.at <= 60.0:
            last[reading.rank] = reading
            return reading
        skipped = now.steps - kept.counters.steps
        return counting(reading, steps=kept.counters.steps, amp_skipped_steps=skipped, aligned=kept.counters.aligned)

    trial = Trial(Training(2, adjust=skip)).trained(90, drift)
    assert "data" not in trial.kinds()
    seconds, finding = trial.find(spend("data_wait", 0.1), kinds={"data"})
    assert finding is not None
    assert seconds < 15.0


def test_a_loss_on_the_device_ends_if_no_step_is_measured_any_more() -> None:
    few = FewMeasuredSteps(8)
    few.is_dry = True
    trial = Trial(Training(1, adjust=few)).trained(60)
    assert trial.kinds() == {"device_reads"}
    few.is_stopped = True
    trial.train(80)
    assert not trial.verdicts[-1].findings


def loaders(trial: Trial, *, became_slow: float) -> None:
    """Let the loaders of all ranks work for a tenth of the time, and after `became_slow` for nearly all of it."""

    def working(reading: RankReading) -> RankReading:
        slow = max(reading.at - became_slow, 0.0)
        busy = 0.1 * (reading.at - slow) + 0.93 * slow
        return counting(reading, loader_working=busy, loader_idle=reading.at - busy)

    trial.training.adjust = working


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("last", [0, 1])
def test_time_before_a_loss_does_not_affect_its_cause(ranks, last) -> None:
    """The data of rank `last` comes last, but all loaders are too slow since the loss began."""
    trial = Trial(Training(ranks))
    loaders(trial, became_slow=30.0)
    trial.train(30)
    trial.train(40, spend("data_wait", 0.12, last))
    assert trial.kinds() == {"data"}


def test_an_explained_finding_is_not_shown_while_both_end() -> None:
    one, every = spend("data_wait", 0.12, 1), spend("data_wait", 0.06)
    trial = Trial().trained(40, one)
    trial.train(60, one, every)
    assert {finding.kind for finding in trial.verdicts[-1].findings} == {"data"}
    began = len(trial.verdicts)
    trial.train(5, one)
    trial.train(60)
    assert {finding.kind for verdict in trial.verdicts[began:] for finding in verdict.findings} == {"data"}


def test_an_explained_finding_is_shown_if_it_lasts_longer() -> None:
    one, every = spend("data_wait", 0.12, 1), spend("data_wait", 0.06)
    trial = Trial().trained(40, one)
    trial.train(60, one, every)
    trial.train(60, one)
    assert {finding.kind for finding in trial.verdicts[-1].findings} == {"straggler"}
