"""Hangs before the first step: which start-ups hang and when, and which only make the other ranks wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from testing.readings import RUN

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import RunJudge, Verdict
from rankscope_exporter.diagnosis.readings import (
    CollectiveCounters,
    Counters,
    GpuCounters,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

LIMITS = Thresholds()
GROUP = "0-1"
STALLED_AT = 5.0
"""When the ranks have their last event."""
MINUTE = 60.0

Used = Callable[[float], float]
"""The seconds or bytes that a rank has used up to a time."""


def working(rate: float, until: float = float("inf")) -> Used:
    """Return the use of a rank that needs so much per second until a time."""
    return lambda at: rate * min(at, until)


WORKS, RESTS = working(1.0), working(0.004)
READ = working(1e6, STALLED_AT)


@dataclass
class Rank:
    """A rank in its start-up."""

    operation: str = ""
    issued: float = 0.0
    cpu: Used | None = WORKS
    children: Used | None = RESTS
    gpu: Used = RESTS
    read: Used | None = READ
    steps: float = 0.0
    passes: float = 0.0
    phase: str = "startup"
    last_event: Callable[[float], float] = field(default=lambda at: min(at, STALLED_AT))

    def reading(self, number: int, at: float) -> RankReading:
        process = ProcessCounters(*(used and used(at) for used in (self.cpu, None, self.children, None, self.read)))
        return RankReading(
            number, at, 0.0, GROUP, "node-a", world_size=2, last_progress=self.last_event(at), phase=self.phase,
            phase_since=0.0, issued={GROUP: self.issued} if self.issued else {},
            collective=GROUP if self.operation else "", operation=self.operation,
            counters=Counters(
                self.steps, {self.phase: at}, micro_steps=self.passes, process=process, gpu=GpuCounters(self.gpu(at)),
                collectives=CollectiveCounters(),
            ),
        )  # fmt: skip


BACKWARD = Rank("ddp_all_reduce", 4.0, cpu=RESTS)
"""It waits in the all-reduce of its first backward pass over gloo."""
BARRIER = Rank("barrier", 1.0, cpu=RESTS)
PAST_A_STEP = Rank(issued=4.0, steps=1.0, passes=1.0, phase="device_wait")
"""Over NCCL, the host has made its first step, and waits for the device without rest."""
PAST_A_PASS = Rank(issued=4.0, passes=1.0)
IDLE = Rank(cpu=working(1.0, STALLED_AT + 8.0))
"""It works for some seconds after its last event, and then stops."""


def start(
    *ranks: Rank, seconds: float = 20 * MINUTE, every: int = 1
) -> tuple[Mapping[float, Verdict], float | None, Finding | None]:
    """Return the verdicts by the seconds since the last event, and when the run hangs with the finding."""
    judge, verdicts = RunJudge(RUN), dict[float, Verdict]()
    for second in range(int(STALLED_AT) % every or every, int(STALLED_AT + seconds) + 1, every):
        at = float(second)
        readings = {number: one.reading(number, at) for number, one in enumerate(ranks)}
        verdicts[at - STALLED_AT] = verdict = judge.update(at, readings)
        if hangs := [one for one in verdict.findings if one.kind == "hang"]:
            return verdicts, at - STALLED_AT, hangs[0]
    return verdicts, None, None


@pytest.mark.parametrize("waiting", [BACKWARD, PAST_A_PASS, PAST_A_STEP, replace(BACKWARD, operation="ddp_broadcast")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_before_its_first_step_is_a_hang_within_90_seconds(waiting, rank) -> None:
    ranks = [waiting, IDLE] if rank else [IDLE, waiting]
    verdicts, after, finding = start(*ranks)
    assert after == pytest.approx(2 * LIMITS.stuck_floor, abs=1.0)
    assert finding
    place = finding.candidate.place
    assert (place.rank, place.node, finding.candidate.cause, finding.severity) == (
        rank,
        "node-a",
        "startup",
        "critical",
    )
    for seconds in (6.0, 30.0, 80.0):
        (pending,) = verdicts[seconds].pending
        assert (pending.candidate.kind, pending.candidate.place.rank, pending.lacks) == ("hang", rank, "time")
        assert pending.remaining == pytest.approx(2 * LIMITS.stuck_floor - seconds, abs=1.0)


@pytest.mark.parametrize("waiting", [BACKWARD, BARRIER, PAST_A_STEP])
@pytest.mark.parametrize(
    "late",
    [
        pytest.param(Rank(), id="compiles, indexes or loads"),
        pytest.param(Rank(cpu=working(0.05)), id="downloads"),
        pytest.param(Rank(cpu=RESTS, children=WORKS), id="compiles or indexes in other processes"),
        pytest.param(Rank(cpu=RESTS, read=working(1e5)), id="loads from slow storage"),
        pytest.param(Rank(cpu=RESTS, gpu=WORKS), id="tunes kernels"),
        pytest.param(Rank(cpu=None), id="unknown CPU time"),
        pytest.param(Rank(cpu=RESTS, children=None), id="unknown child processes"),
        pytest.param(Rank(cpu=RESTS, read=None), id="unknown storage"),
    ],
)
def test_a_rank_that_works_for_the_others_is_named_and_is_no_hang(waiting, late) -> None:
    verdicts, after, _ = start(late, waiting, seconds=11 * MINUTE, every=3)
    assert after is None
    for seconds in (6.0, 45.0, 90.0, 600.0):
        (pending,) = (one for one in verdicts[seconds].pending if one.candidate.kind == "hang")
        assert pending.candidate.place.rank == 0
        if seconds >= 45.0:
            assert pending.lacks == "startup"
            assert pending.remaining == pytest.approx(LIMITS.planned - seconds, abs=1.0)


def test_an_idle_rank_that_others_wait_for_before_training_may_download_and_has_ten_minutes() -> None:
    verdicts, after, finding = start(IDLE, BARRIER)
    assert after == pytest.approx(LIMITS.startup, abs=1.0)
    assert finding
    assert finding.candidate.place.rank == 0
    (pending,) = verdicts[6.0].pending
    assert (pending.candidate.place.rank, pending.lacks) == (0, "time")


def test_a_rank_that_stops_after_it_has_worked_long_is_a_hang_when_it_has_been_idle_for_45_seconds() -> None:
    _, after, finding = start(Rank(cpu=working(1.0, 300.0)), BACKWARD)
    assert after == pytest.approx(300.0 + LIMITS.stuck_floor, abs=11.0)
    assert finding


def test_a_start_up_that_takes_longer_than_any_is_a_hang() -> None:
    _, after, _ = start(Rank(), BARRIER, seconds=40 * MINUTE)
    assert after == pytest.approx(LIMITS.planned, abs=1.0)


def test_a_rank_with_events_in_its_start_up_makes_progress() -> None:
    """A rank that reads the batches that it has trained on before its restart."""
    verdicts, after, _ = start(Rank(cpu=RESTS, last_event=lambda at: at - at % 2.0), BACKWARD)
    assert after is None
    assert all(one.candidate.kind != "hang" for verdict in verdicts.values() for one in verdict.pending)


def test_ranks_in_the_same_collective_may_connect_for_long() -> None:
    """The first collective makes the connections. Only some ranks may have counted those of C++ code before."""
    for other in (BARRIER, replace(BARRIER, issued=4.0)):
        _, after, _ = start(BARRIER, other)
        assert after is None


def test_ranks_that_have_issued_nothing_are_no_hang() -> None:
    verdicts, after, _ = start(IDLE, IDLE)
    assert after is None
    assert not verdicts[100.0].pending


def test_a_hang_in_the_start_up_explains_that_it_is_slow() -> None:
    judge = RunJudge(RUN)
    for second in range(1, 700):
        verdict = judge.update(second, {n: one.reading(n, second) for n, one in enumerate((IDLE, BACKWARD))})
    assert [one.kind for one in verdict.findings] == ["hang"]
