"""The ring of the last steps: what is read is what was written, however fast the writer is."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope import record
from rankscope.rank_reader import UnreadableRecordError, read_rank
from rankscope.rank_snapshot import Step
from rankscope.rank_writer import RankWriter
from rankscope.timeline import Timeline

INFO = {"run": "r", "rank": "0", "phases": []}

# Each step n lasts n seconds by the writer's clock, all of them in forward: any mixture of two entries shows.
FAST_WRITER = """
import sys
from pathlib import Path
from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.timeline import Timeline
now = 0.0
writer = RankWriter()
timeline = Timeline(writer, lambda: now)
writer.publish(Path(sys.argv[1]), "fast", {"run": "r", "rank": "0"})
print("stepping", flush=True)
number = 0
while True:
    number += 1
    opened = timeline.enter(record.FORWARD)
    now += number
    timeline.leave(opened)
    timeline.step()
"""


class Job:
    """A timeline on a clock of its own, published in a directory."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.writer = RankWriter()
        self.timeline = Timeline(self.writer, lambda: self.now)
        self.writer.publish(directory, "job", INFO)

    def step(self, **phases: float) -> None:
        for phase, seconds in phases.items():
            opened = self.timeline.enter(record.PHASES.index(phase))
            self.now += seconds
            self.timeline.leave(opened)
        self.timeline.step()

    def steps_after(self, number: int) -> list[Step]:
        assert self.writer.path is not None
        return read_rank(self.writer.path, with_steps=True).steps_after(number)


def in_phase(step: Step, phase: str) -> float:
    return step.phases[record.PHASES.index(phase)]


def test_a_step_has_its_end_its_length_and_its_phases(run_dir: Path) -> None:
    job = Job(run_dir)
    job.step(forward=1.0)  # in start-up
    job.step(forward=1.0, collective_wait=0.5)
    (step,) = job.steps_after(0)
    assert (step.number, step.end, step.seconds) == (2, 1002.5, 1.5)
    assert in_phase(step, "forward") == 1.0
    assert in_phase(step, "collective_wait") == 0.5
    assert sum(step.phases) == step.seconds


def test_only_the_steps_after_the_given_one_are_read(run_dir: Path) -> None:
    job = Job(run_dir)
    for _ in range(10):
        job.step(forward=1.0)
    assert [step.number for step in job.steps_after(7)] == [8, 9, 10]
    assert job.steps_after(10) == job.steps_after(11) == []


def test_a_record_without_steps_has_none(run_dir: Path) -> None:
    assert Job(run_dir).steps_after(0) == []


def test_what_was_overwritten_and_what_the_writer_may_be_at_is_left_out(run_dir: Path) -> None:
    job = Job(run_dir)
    for _ in range(300):
        job.step(forward=1.0)
    numbers = [step.number for step in job.steps_after(0)]
    # The writer may be at entry 301, in the place of 173; of 174 the beginning is then unknown.
    assert numbers == list(range(300 - record.RING_STEPS + 3, 301))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.floats(0.001, 1000), min_size=1, max_size=200), after=st.integers(0, 220))
def test_whatever_was_stepped_is_read_back(run_dir: Path, lengths: list[float], after: int) -> None:
    (run_dir / "job.rank").unlink(missing_ok=True)
    job = Job(run_dir)
    for seconds in lengths:
        job.step(backward=seconds)
    for step in job.steps_after(after):
        assert step.number > after
        assert step.seconds == pytest.approx(lengths[step.number - 1], abs=1e-6)
        assert in_phase(step, "backward") == pytest.approx(lengths[step.number - 1], abs=1e-6)


def test_a_writer_that_steps_as_fast_as_it_can_never_shows_a_torn_step(run_dir: Path) -> None:
    seen, last = 0, 0
    with subprocess.Popen([sys.executable, "-c", FAST_WRITER, str(run_dir)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"stepping\n"
            for _ in range(3000):
                for step in read_rank(run_dir / "fast.rank", with_steps=True).steps_after(last):
                    assert step.number > last
                    assert step.seconds == step.number == in_phase(step, "forward")
                    assert step.end == step.number * (step.number + 1) / 2
                    seen, last = seen + 1, step.number
        finally:
            writer.kill()
    assert seen > 3000


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("place", [0, 1, 4, 5])
def test_an_entry_that_no_rank_writes_is_left_out(run_dir: Path, value: float, place: int) -> None:
    job = Job(run_dir)
    for _ in range(5):
        job.step(forward=1.0)
    job.writer.ring[3][place] = value
    assert [step.number for step in job.steps_after(0)] == [2, 5]


@pytest.mark.parametrize("value", [2.0**53, 2.0**62])
def test_a_number_of_steps_that_nobody_took_costs_no_time(run_dir: Path, value: float) -> None:
    job = Job(run_dir)
    job.step(forward=1.0)
    job.writer.slots[record.PLACES["steps"]] = value
    assert job.steps_after(0) == []


def test_a_record_that_is_cut_within_the_ring_is_truncated(run_dir: Path) -> None:
    job = Job(run_dir)
    assert job.writer.path is not None
    data = job.writer.path.read_bytes()
    (run_dir / "cut.rank").write_bytes(data[: record.RING_OFFSET + 100])
    with pytest.raises(UnreadableRecordError, match="bytes of") as caught:
        read_rank(run_dir / "cut.rank", with_steps=True)
    assert caught.value.reason == "truncated"
