"""Ranks that run out of memory on their GPU, before the end and at it, and jobs that are full and healthy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testing.readings import RUN, Adjust, Training, Trial, spend

from rankscope_exporter.diagnosis.detectors import crash, out_of_memory
from rankscope_exporter.diagnosis.findings import Candidate, Finding
from rankscope_exporter.diagnosis.readings import DeviceMemory, Ending, GpuReading, RankReading
from rankscope_exporter.diagnosis.words import advice, evidence, sentence

GIB = 2.0**30
CAPACITY = 80 * GIB
FULL = DeviceMemory(50 * GIB, 79 * GIB, 78 * GIB, CAPACITY)
"""A job that fills its GPU by design."""
MINUTE, HOUR = 60.0, 3600.0

Change = Callable[[float], DeviceMemory | None]
"""The memory of a rank by the time."""


def using(memory: Change, *ranks: int, foreign: float | None = None) -> Adjust:
    """Give these ranks (by default all) this memory, and others' memory on their GPUs."""

    def adjust(one: RankReading) -> RankReading:
        own = memory(one.at) if one.rank in ranks or not ranks else FULL
        pid = None if foreign is None else 4711
        gpu = GpuReading(
            str(one.rank), 0.99, 1, 0.0, total_bytes=1.01 * CAPACITY, foreign_bytes=foreign, foreign_pid=pid
        )
        return replace(one, memory=own, gpu=gpu)

    return adjust


def often(seconds: float, since: float = 0.0, until: float = 1e9, memory: DeviceMemory = FULL) -> Change:
    """Return memory with a retry each so many seconds in that time."""
    return lambda at: replace(memory, retries=float(max(min(at, until) - since, 0.0) // seconds))


def failing(seconds: float, until: float = 1e9) -> Change:
    """Return memory with a failed allocation each so many seconds, before which the allocator retries."""
    return lambda at: replace(FULL, retries=min(at, until) // seconds, failures=min(at, until) // seconds)


def growing(per_hour: float, start: float = 40.0, headroom: float = 10.0) -> Change:
    """Return memory that grows by so many GiB in an hour, with a peak so many GiB above it."""

    def memory(at: float) -> DeviceMemory:
        allocated = (start + per_hour * at / HOUR) * GIB
        return DeviceMemory(allocated, CAPACITY, allocated + headroom * GIB, CAPACITY)

    return memory


def found(adjust: Adjust, minutes: float = 25.0, training: Training | None = None) -> Finding | None:
    trial = Trial(training or Training(2), every=10)
    trial.training.adjust = adjust
    trial.train(minutes * MINUTE)
    return next(iter(trial.opened(out_of_memory.KIND)), None)


def test_an_allocator_that_retries_again_and_again_runs_out_of_memory() -> None:
    finding = found(using(often(20.0), 1))
    assert finding
    assert (finding.candidate.cause, finding.candidate.place.rank, finding.severity) == (
        "too_little_capacity",
        1,
        "warning",
    )
    assert finding.candidate.evidence == {"retries": 10.0, "peak": 78 * GIB, "capacity": CAPACITY}
    assert sentence(RUN, finding.candidate) == (
        "Rank 1 (node-a, GPU 1) of run llm runs out of GPU memory: it needs more than there is"
    )


DECOYS: dict[str, Change] = {
    "full by design": lambda _: FULL,
    "a retry at the first long batch": lambda at: replace(FULL, retries=float(at > 300.0)),
    "many retries in one minute": lambda at: replace(FULL, retries=20.0 * (at > 300.0)),
    "a retry every two minutes": often(120.0),
    "two failures": failing(30.0, until=70.0),
    "a failure every ten minutes": failing(600.0),
    "no CUDA": lambda _: None,
    "growth that ends, as of a cache": lambda at: growing(60.0 * min(at, 600.0) / max(at, 1.0))(at),
    "growth that slows down": lambda at: growing(20.0 * (600.0 / (at + 600.0)))(at),
    "growth that takes days": growing(1.0),
    "a peak that rises by longer batches": lambda at: replace(FULL, peak=(40 + at / 60.0) * GIB),
    "an unknown capacity": lambda at: replace(growing(30.0)(at), capacity=None),
    "cycles that are collected each ten minutes": lambda at: growing(30.0 * (at % 600.0) / max(at, 1.0))(at),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_a_full_gpu_is_no_finding_by_itself(decoy: str) -> None:
    assert found(using(DECOYS[decoy])) is None


def test_allocations_that_fail_again_and_again_are_a_finding_although_the_script_goes_on() -> None:
    finding = found(using(failing(60.0), 0), minutes=6)
    assert finding
    assert finding.candidate.evidence["failures"] >= 3.0
    assert "retries" not in finding.candidate.evidence


def test_failures_with_few_steps_between_them_are_a_search_for_the_batch_size_and_no_finding() -> None:
    trial = Trial(Training(1), every=5)
    trial.training.adjust = using(failing(60.0, until=900.0))
    trial.train(15 * MINUTE, spend("forward", 100.0))
    assert trial.opened(out_of_memory.KIND) == []
    trial.train(15 * MINUTE)
    assert trial.opened(out_of_memory.KIND) == []


def test_steady_growth_is_a_finding_hours_before_the_memory_is_full() -> None:
    finding = found(using(growing(10.0, start=45.0), 1))
    assert finding
    assert finding.candidate.cause == "growing"
    assert finding.candidate.evidence["full_in"] == pytest.approx(2.2 * HOUR, rel=0.1)
    assert sentence(RUN, finding.candidate).endswith("its memory grows steadily, and is full in about 2.3 h")


def test_growth_with_noise_is_steady_and_the_finding_stays_while_it_grows() -> None:
    trial = Trial(Training(1), every=5)

    def noisy(at: float) -> DeviceMemory:
        memory = growing(20.0)(at)
        return replace(memory, allocated=memory.allocated + (at % 3.0) * GIB / 10.0)

    trial.training.adjust = using(noisy)
    assert not trial.train(15 * MINUTE).findings
    trial.train(15 * MINUTE)
    assert len(trial.opened(out_of_memory.KIND)) == 1
    assert [one.kind for one in trial.train(10 * MINUTE).findings] == [out_of_memory.KIND]


@pytest.mark.parametrize(
    ("memory", "foreign", "cause"),
    [
        (replace(FULL, peak=60 * GIB), 15 * GIB, "fragmentation"),
        (replace(FULL, peak=60 * GIB), 1 * GIB, "fragmentation"),
        (replace(FULL, peak=60 * GIB), 25 * GIB, "foreign_process"),
        (replace(FULL, peak=75 * GIB), None, "too_little_capacity"),
        (replace(FULL, peak=50 * GIB, reserved=52 * GIB), 0.0, "unknown"),
        (replace(FULL, capacity=None), None, "unknown"),
        (replace(FULL, capacity=20 * GIB, peak=19 * GIB, reserved=20 * GIB), 15 * GIB, "too_little_capacity"),
    ],
)
def test_the_cause_is_what_takes_the_memory(memory: DeviceMemory, foreign: float | None, cause: str) -> None:
    finding = found(using(often(20.0, memory=memory), 1, foreign=foreign), minutes=6)
    assert finding
    assert finding.candidate.cause == cause
    assert ("foreign_pid" in finding.candidate.evidence) == (cause == "foreign_process")
    assert advice(finding.candidate)


def test_ranks_that_share_a_gpu_share_its_capacity() -> None:
    memory = replace(FULL, peak=35 * GIB, reserved=36 * GIB)

    def shared(one: RankReading) -> RankReading:
        return replace(using(often(20.0, memory=memory))(one), uuid="GPU-0")

    finding = found(shared, minutes=6)
    assert finding
    assert (finding.candidate.cause, finding.candidate.place.ranks) == ("too_little_capacity", (0, 1))


def test_the_state_ends_after_the_last_retries() -> None:
    trial = Trial(Training(2), every=5)
    trial.training.adjust = using(often(20.0, until=600.0))
    assert [one.kind for one in trial.train(10 * MINUTE).findings] == [out_of_memory.KIND]
    assert not trial.train(5 * MINUTE).findings


def test_a_restarted_process_has_neither_the_retries_nor_the_growth_of_the_last_one() -> None:
    trial = Trial(Training(2), every=5)
    for _ in range(6):
        began = trial.training.now
        trial.training.adjust = using(lambda at, began=began: growing(30.0)(at - began))
        trial.train(4 * MINUTE)
        trial.training.restart()
    assert trial.opened(out_of_memory.KIND) == []


def test_a_restart_of_the_exporter_keeps_the_growth() -> None:
    before, after = Trial(Training(2), every=5), Trial(Training(2), every=5)
    before.training.adjust = using(growing(20.0))
    before.train(12 * MINUTE)
    after.judge.restore(before.judge.state(before.training.now), before.training.now)
    after.training = before.training
    after.train(10 * MINUTE)
    assert after.opened(out_of_memory.KIND)


def ended(
    memory: DeviceMemory | None, foreign: float | None = None, requested: float | None = None, phase: str = "backward"
) -> Candidate:
    """Return the crash of rank 1, whose exception says that the GPU's memory was exhausted."""
    trial = Trial(Training(2))
    trial.training.adjust = using(lambda _: memory, 1, foreign=foreign)
    trial.train(30)
    for at, ranks in trial.training.train(8):
        gpu = GpuReading("1", 0.2, 0, 0.0, foreign_bytes=0.0)  # of the GPU now
        gone = replace(ranks[1], gpu=gpu, ended=Ending("exception", 31.0, "device", phase, requested))
        verdict = trial.judge.update(at, {**ranks, 1: gone})
    (finding,) = verdict.findings
    assert (finding.kind, finding.candidate.place.rank) == (crash.KIND, 1)
    return finding.candidate


def test_a_rank_that_ended_for_lack_of_memory_has_the_phase_and_the_peak() -> None:
    candidate = ended(FULL, requested=2 * GIB)
    assert candidate.cause == "out_of_memory"
    assert sentence(RUN, candidate) == "Rank 1 (node-a, GPU 1) of run llm ran out of GPU memory in backward"
    assert candidate.evidence == {"peak": 78 * GIB, "capacity": CAPACITY, "requested": 2 * GIB}
    assert evidence(candidate).startswith("78 GiB allocated at the peak; 80 GiB available in all; 2 GiB requested")


@pytest.mark.parametrize(
    ("memory", "foreign", "requested", "named"),
    [
        (replace(FULL, peak=60 * GIB, reserved=62 * GIB), 16 * GIB, 4 * GIB, {"foreign_bytes", "foreign_pid"}),
        (replace(FULL, peak=60 * GIB, reserved=78 * GIB), 1 * GIB, 4 * GIB, {"unused", "requested"}),
        (replace(FULL, peak=60 * GIB, reserved=78 * GIB), 1 * GIB, 20 * GIB, {"requested"}),
        (replace(FULL, peak=60 * GIB, reserved=62 * GIB), 4 * GIB, None, set()),
        (replace(FULL, peak=60 * GIB, reserved=62 * GIB), 16 * GIB, None, {"foreign_bytes", "foreign_pid"}),
    ],
)
def test_memory_of_others_and_unused_memory_are_named_if_the_request_would_have_fit(
    memory: DeviceMemory, foreign: float, requested: float | None, named: set[str]
) -> None:
    """The GPU's processes are those of the last reading before the end."""
    assert ended(memory, foreign, requested).evidence.keys() == {"peak", "capacity", *named}


def test_without_the_allocators_counters_the_crash_says_less() -> None:
    candidate = ended(None, phase="")
    assert sentence(RUN, candidate) == "Rank 1 (node-a, GPU 1) of run llm ran out of GPU memory"
    assert candidate.evidence.keys() == {"living_ranks", "steps"}
    unknown = ended(replace(FULL, capacity=None))
    assert unknown.evidence == {"peak": 78 * GIB}
    assert unknown.cause == "out_of_memory"


def test_a_crash_explains_that_its_rank_ran_out_of_memory_before() -> None:
    trial = Trial(Training(2))
    trial.training.adjust = using(often(10.0), 0, 1)
    assert [one.kind for one in trial.train(5 * MINUTE).findings] == [out_of_memory.KIND]
    for at, ranks in trial.training.train(8):
        verdict = trial.judge.update(at, {**ranks, 1: replace(ranks[1], ended=Ending("exception", 301.0, "device"))})
    assert [one.kind for one in verdict.findings] == [crash.KIND]
    assert [one.candidate.kind for one in verdict.pending if one.lacks == "explained"] == [out_of_memory.KIND]
