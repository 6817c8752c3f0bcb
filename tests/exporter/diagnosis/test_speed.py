"""A run is compared with its own past at the same work. A minute of these tests is ten in production."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from testing.readings import EARLY, Adjust, Change, Training, Trial, Work, counting, drift, spend

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.readings import (
    CollectiveCounters,
    GpuCounters,
    GpuReading,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

MINUTE = replace(EARLY, slower_seconds=60.0)
ONSET = 150.0
Of = Callable[[float], float]
"""A value at a time."""


def since_onset(usual: float, then: float) -> Of:
    return lambda at: then if at > ONSET else usual


def constant(value: float) -> Of:
    return lambda _at: value


TWICE = since_onset(1.0, 2.0)


def counted(
    *,
    per_step: dict[str, Of] | None = None,
    queue: Of = lambda _at: 0.0,
    cpu: Of = lambda _at: 0.5,
    clock: Of = lambda _at: 1.0,
    throttled: Of = lambda _at: 0.0,
    memory: Of = lambda _at: 0.6,
    processes: Of = lambda _at: 1.0,
) -> Adjust:
    """Return readings that count these values, per step or per second."""
    steps = {"calls": constant(1.0), "bytes": constant(1e8), **(per_step or {})}
    seconds = {"queue": queue, "cpu": cpu, "clock": clock, "throttled": throttled}
    totals: dict[tuple[int, str], float] = defaultdict(float)
    last: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def change(one: RankReading) -> RankReading:
        rank, (made, at) = one.rank, last[one.rank]
        last[rank] = one.counters.steps, one.at
        for rates, more in ((steps, one.counters.steps - made), (seconds, one.at - at)):
            for name, rate in rates.items():
                totals[rank, name] += more * rate(one.at)
        of_rank = {name: totals[rank, name] for name in (*steps, *seconds)}
        calls, moved = of_rank.pop("calls"), of_rank.pop("bytes")
        process = ProcessCounters(of_rank.pop("cpu"), of_rank.pop("queue"), 0.0, 0.0, 0.0)
        gpu = GpuCounters(0.95 * one.at, {"sw_power_cap": of_rank.pop("throttled")}, of_rank.pop("clock"))
        now = GpuReading(str(rank), memory(one.at), int(processes(one.at)), 0.0)
        collectives = CollectiveCounters({"ddp_all_reduce": calls}, {"ddp_all_reduce": moved})
        return counting(replace(one, gpu=now), process=process, gpu=gpu, collectives=collectives, **of_rank)

    return change


def slower(training: Training, *changes: Change, healthy: float = ONSET, seconds: float = 100.0) -> list[Finding]:
    """Return the slowdowns of a run that changes after some time."""
    trial = Trial(training, MINUTE).trained(healthy, drift).trained(seconds, drift, *changes)
    assert trial.kinds() <= {"slowdown"}
    return trial.opened("slowdown")


QUARTER = spend("forward", 0.0525)
LONGER = spend("forward", 0.07), spend("backward", 0.13)
CONTENDED = since_onset(0.0, 0.5)


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_run_whose_steps_take_twice_as_long_at_the_same_work_is_slower_than_it_was(ranks, clock) -> None:
    training = Training(ranks, clock=clock, adjust=counted(queue=CONTENDED))
    (finding,) = slower(training, *LONGER)
    assert finding.candidate.cause == "cpu_contention"
    assert finding.candidate.ratio == pytest.approx(0.2 / 0.41, abs=0.02)
    assert finding.since == pytest.approx(ONSET, abs=10.0)
    assert finding.opened - finding.since >= MINUTE.slower_seconds


def test_steps_that_are_a_quarter_longer_are_enough() -> None:
    training = Training(2, adjust=counted(queue=since_onset(0.0, 0.2)))
    assert slower(training, QUARTER)


@pytest.mark.parametrize(
    ("cause", "adjust"),
    [
        ("clocks", counted(clock=since_onset(0.9, 0.45))),
        ("throttled", counted(clock=since_onset(0.9, 0.45), throttled=since_onset(0.0, 1.0))),
        ("foreign_process", counted(processes=TWICE, memory=since_onset(0.6, 0.8))),
        ("unknown", counted(per_step={"tokens": constant(4096.0)})),
    ],
)
def test_the_cause_is_what_has_changed(cause, adjust) -> None:
    (finding,) = slower(Training(2, adjust=adjust), *LONGER)
    assert finding.candidate.cause == cause


@pytest.mark.parametrize("phase", ["other", "tokenize"])
@pytest.mark.parametrize(("cause", "cpu"), [("io", 0.25), ("other", 0.6)])
def test_time_outside_of_the_model_is_waited_or_computed(phase, cause, cpu) -> None:
    samples = {"samples": constant(8.0)}
    training = Training(2, adjust=counted(cpu=since_onset(0.5, cpu), per_step=samples))
    (finding,) = slower(training, spend(phase, 0.2))
    assert finding.candidate.cause == cause


def test_more_time_outside_of_the_model_has_no_finding_if_samples_are_not_counted() -> None:
    """It may be longer rollouts."""
    assert not slower(Training(2, adjust=counted(cpu=since_onset(0.5, 0.25))), spend("other", 0.2))


def test_longer_steps_have_no_finding_if_nothing_else_has_changed() -> None:
    """They may do more than is counted, such as another loss."""
    assert not slower(Training(2, adjust=counted()), *LONGER)
    assert not slower(Training(2, adjust=counted(per_step={"samples": constant(8.0)})), *LONGER)


@pytest.mark.parametrize("name", ["samples", "tokens", "copied_bytes", "micro_steps", "calls", "bytes"])
def test_longer_steps_that_do_more_are_not_slower(name) -> None:
    usual = {"samples": constant(8.0), name: TWICE}
    assert not slower(Training(2, adjust=counted(queue=CONTENDED, per_step=usual)), *LONGER)


def test_longer_steps_that_need_more_memory_may_do_more() -> None:
    memory = since_onset(0.4, 0.6)
    assert not slower(Training(2, adjust=counted(queue=CONTENDED, memory=memory)), *LONGER)
    tokens = {"tokens": constant(4096.0)}
    assert slower(Training(2, adjust=counted(queue=CONTENDED, memory=memory, per_step=tokens)), *LONGER)


def test_a_run_whose_work_is_not_counted_has_no_finding() -> None:
    unknown = {"calls": constant(0.0), "bytes": constant(0.0)}
    assert not slower(Training(1, adjust=counted(queue=CONTENDED, per_step=unknown)), *LONGER)


def test_sequences_that_grow_slowly_are_not_slower() -> None:
    def length(at: float) -> float:
        return float(1.01 ** (at / 6.0))

    def grow(step: int, _rank: int, work: Work) -> None:
        for phase in ("forward", "backward"):
            work[phase] *= length(0.3 * step) ** 2

    tokens = {"tokens": lambda at: 4096.0 * length(at)}
    training = Training(2, adjust=counted(per_step=tokens, queue=lambda at: min(at / 600.0, 0.5)))
    assert not slower(training, grow, healthy=5.0, seconds=500.0)


@pytest.mark.parametrize(
    "change",
    [
        spend("forward", 0.042),
        spend("evaluation", 30.0, every=100),
        spend("checkpoint", 20.0, every=100),
        spend("checkpoint", 20.0, 0, every=100),
        spend("other", 40.0, every=100),
        spend("tokenize", 0.0),
    ],
    ids=["a fifth longer", "evaluation", "checkpoints", "checkpoints of one rank", "pauses", "nothing"],
)
def test_a_run_that_changes_little_or_pauses_as_planned_is_not_slower(change) -> None:
    assert not slower(Training(2, adjust=counted(queue=CONTENDED)), change, seconds=300.0)


def test_steps_that_vary_are_not_slower() -> None:
    draw = random.Random(3)

    def vary(_step: int, _rank: int, work: Work) -> None:
        work["backward"] *= draw.uniform(0.7, 1.3)

    training = Training(1, adjust=counted(per_step={"tokens": constant(4096.0)}, queue=CONTENDED))
    assert not slower(training, vary, seconds=600.0)


def test_a_run_that_is_slow_from_the_start_is_not_slower_than_it_was() -> None:
    training = Training(2, adjust=counted(queue=constant(0.5)))
    assert not slower(training, *LONGER, healthy=5.0, seconds=300.0)


def test_first_steps_that_compile_are_no_past() -> None:
    training = Training(2, adjust=counted(queue=CONTENDED))
    trial = Trial(training, MINUTE).trained(30, spend("forward", 3.0)).trained(120, drift)
    assert trial.trained(100, *LONGER).opened("slowdown")


def test_a_slow_minute_that_is_over_is_no_finding() -> None:
    training = Training(2, adjust=counted(queue=lambda at: 0.5 if ONSET < at < 200.0 else 0.0))
    trial = Trial(training, MINUTE).trained(ONSET, drift).trained(45, drift, *LONGER).trained(150, drift)
    assert not trial.kinds()


def test_a_run_that_is_often_slow_is_not_slower() -> None:
    training = Training(2, adjust=counted(queue=lambda at: 0.5 if at % 40.0 < 20.0 else 0.0))
    trial = Trial(training, MINUTE)
    for _ in range(6):
        trial.trained(20, drift).trained(20, drift, *LONGER)
    assert not trial.trained(100, drift, *LONGER).kinds()


def test_a_finding_lasts_as_long_as_the_run_is_slower_and_no_longer() -> None:
    training = Training(2, adjust=counted(queue=lambda at: 0.5 if ONSET < at < 1000.0 else 0.0))
    trial = Trial(training, MINUTE).trained(ONSET, drift).trained(850, drift, *LONGER)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["slowdown"]
    assert not trial.train(30, drift).findings
    assert len(trial.opened("slowdown")) == 1


def test_a_finding_ends_when_the_work_changes() -> None:
    tokens = {"tokens": lambda at: 4096.0 if at < 300.0 else 8192.0}
    training = Training(2, adjust=counted(queue=CONTENDED, per_step=tokens))
    trial = Trial(training, MINUTE).trained(ONSET, drift).trained(150, drift, *LONGER)
    assert trial.verdicts[-1].findings
    assert not trial.train(30, drift, *LONGER).findings


def test_a_restart_has_no_past() -> None:
    training = Training(2, adjust=counted(queue=CONTENDED))
    trial = Trial(training, MINUTE).trained(ONSET, drift)
    training.restart()
    assert not trial.trained(150, drift, *LONGER).opened("slowdown")


def test_a_slow_rank_is_its_own_finding() -> None:
    training = Training(4, adjust=counted(queue=CONTENDED))
    trial = Trial(training, MINUTE).trained(ONSET, drift).trained(150, drift, spend("backward", 0.2, 1))
    assert trial.kinds() == {"straggler"}


def test_the_past_and_the_finding_survive_a_restart_of_the_exporter() -> None:
    training = Training(2, adjust=counted(queue=lambda at: 0.5 if ONSET < at < 290.0 else 0.0))
    before = Trial(training, MINUTE).trained(ONSET, drift).trained(100, drift, *LONGER)
    (found,) = before.opened("slowdown")
    after = Trial(training, MINUTE)
    after.judge.restore(before.judge.state(training.now), training.now)
    (finding,) = after.train(40, drift, *LONGER).findings
    assert finding.since == pytest.approx(found.since, abs=1.0)
    assert len(after.opened("slowdown")) == 1
    assert not after.train(30, drift).findings
    again = Trial(training, MINUTE)
    again.judge.restore(after.judge.state(training.now), training.now)
    assert again.judge.history.speed.rows == after.judge.history.speed.rows


class Unfrozen(Training):
    """Transfer takes seven times as long from the onset on."""

    def _begin_step(self, changes: tuple[Change, ...]) -> None:
        self._transfer = 0.07 if self.now > ONSET else 0.01
        super()._begin_step(changes)


@pytest.mark.parametrize(("times", "kinds"), [(1.0, {"network"}), (10.0, set())], ids=["same", "ten times"])
@pytest.mark.parametrize("clock", ["host", "device"])
def test_more_bytes_in_a_step_explain_a_longer_transfer(times, kinds, clock) -> None:
    moved = {"bytes": since_onset(1e8, times * 1e8)}
    training = Unfrozen(4, clock=clock, adjust=counted(per_step=moved))
    assert Trial(training, Thresholds()).trained(400, drift).kinds() == kinds
