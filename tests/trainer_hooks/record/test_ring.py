"""The rings of the last steps, of the host and the device: no entry is torn, however fast the writer is."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.programs import python, running

from rankscope.record import layout
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import DeviceStep, Step
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

DEVICE_STEPS = layout.INDEX["device_steps"]
INFO = {"run": "r", "rank": "0", "phases": []}

# Step n lasts n seconds by the writer's clock, all in forward, so a mixture of two entries is detected.
FAST_WRITER = """
import sys
from pathlib import Path
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
now = 0.0
writer = RankWriter()
timeline = Timeline(writer, lambda: now)
writer.publish(Path(sys.argv[1]), "fast", {"run": "r", "rank": "0"})
print("ready", flush=True)
number = 0
while True:
    number += 1
    opened = timeline.enter(layout.FORWARD)
    now += number
    timeline.leave(opened)
    timeline.step()
"""

# Each number of step n is n, so a mixture of two entries is detected.
FAST_DEVICE = """
import sys
from array import array
from pathlib import Path
from rankscope.record import layout
from rankscope.record.writer import RankWriter
writer = RankWriter()
writer.publish(Path(sys.argv[1]), "fast", {"run": "r", "rank": "0"})
print("ready", flush=True)
number = 0
while True:
    number += 1
    writer.device_ring[number % layout.DEVICE_RING_STEPS][:] = array("d", [number] * layout.DEVICE_RING_WIDTH)
    writer.slots[layout.INDEX["device_steps"]] = number
"""


class Job:
    """A published timeline with a simulated clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.writer = RankWriter()
        self.timeline = Timeline(self.writer, lambda: self.now)
        self.writer.publish(directory, "job", INFO)

    def step(self, **phases: float) -> None:
        for phase, seconds in phases.items():
            opened = self.timeline.enter(layout.PHASES.index(phase))
            self.now += seconds
            self.timeline.leave(opened)
        self.timeline.step()

    def steps_after(self, number: int) -> list[Step]:
        assert self.writer.path is not None
        return read_rank(self.writer.path, with_steps=True).steps_after(number)

    def measure(self, number: int, end: float = 1.0, sequence: int = 1, **phases: float) -> None:
        """Write the measured step `number`."""
        slots, nth = self.writer.slots, self.writer.slots[DEVICE_STEPS] + 1
        entry = (nth, number, end, sequence, *(phases.get(phase, 0.0) for phase in layout.PHASES))
        self.writer.device_ring[int(nth) % layout.DEVICE_RING_STEPS][:] = array("d", entry)
        slots[DEVICE_STEPS] = nth

    def device_steps_after(self, nth: int) -> list[DeviceStep]:
        assert self.writer.path is not None
        return read_rank(self.writer.path, with_steps=True).device_steps_after(nth)


def in_phase(step: Step | DeviceStep, phase: str) -> float:
    return step.phases[layout.PHASES.index(phase)]


def test_a_step_has_its_end_its_length_and_its_phases(run_dir: Path) -> None:
    job = Job(run_dir)
    job.step(forward=1.0)  # in startup
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


def test_entries_that_are_or_may_be_overwritten_are_omitted(run_dir: Path) -> None:
    job = Job(run_dir)
    for _ in range(300):
        job.step(forward=1.0)
    numbers = [step.number for step in job.steps_after(0)]
    # The writer may be writing entry 301, which overwrites 173; then the start of 174 is not known.
    assert numbers == list(range(300 - layout.RING_STEPS + 3, 301))


@settings(max_examples=60)
@given(lengths=st.lists(st.floats(0.001, 1000), min_size=1, max_size=200), after=st.integers(0, 220))
def test_steps_of_any_lengths_are_read_as_written(run_dir: Path, lengths: list[float], after: int) -> None:
    (run_dir / "job.rank").unlink(missing_ok=True)
    job = Job(run_dir)
    for seconds in lengths:
        job.step(backward=seconds)
    for step in job.steps_after(after):
        assert step.number > after
        assert step.seconds == pytest.approx(lengths[step.number - 1], abs=1e-6)
        assert in_phase(step, "backward") == pytest.approx(lengths[step.number - 1], abs=1e-6)


def test_a_reader_never_sees_a_torn_step_of_a_fast_writer(run_dir: Path) -> None:
    seen, last, readings = 0, 0, 0
    with running(*python(FAST_WRITER, run_dir)):
        while readings < 3000 or seen <= 3000:
            for step in read_rank(run_dir / "fast.rank", with_steps=True).steps_after(last):
                assert step.number > last
                assert step.seconds == step.number == in_phase(step, "forward")
                assert step.end == step.number * (step.number + 1) / 2
                seen, last = seen + 1, step.number
            readings += 1


def test_a_reader_never_sees_a_torn_measured_step_of_a_fast_writer(run_dir: Path) -> None:
    seen, last, readings = 0, 0, 0
    with running(*python(FAST_DEVICE, run_dir)):
        while readings < 3000 or seen <= 3000:
            for step in read_rank(run_dir / "fast.rank", with_steps=True).device_steps_after(last):
                assert step.nth > last
                assert {step.nth, step.number, step.end, step.sequence, *step.phases} == {step.nth}
                seen, last = seen + 1, step.nth
            readings += 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_an_invalid_entry_is_omitted(run_dir: Path, value: float, index: int) -> None:
    job = Job(run_dir)
    for _ in range(5):
        job.step(forward=1.0)
    job.writer.ring[3][index] = value
    assert [step.number for step in job.steps_after(0)] == [2, 5]


@pytest.mark.parametrize("value", [2.0**53, 2.0**62])
def test_a_forged_number_of_steps_takes_no_time(run_dir: Path, value: float) -> None:
    job = Job(run_dir)
    job.step(forward=1.0)
    job.writer.slots[layout.INDEX["steps"]] = value
    assert job.steps_after(0) == []


@pytest.mark.parametrize("ring", [layout.RING_OFFSET, layout.DEVICE_RING_OFFSET])
def test_a_record_that_ends_in_a_ring_is_truncated(run_dir: Path, ring: int) -> None:
    job = Job(run_dir)
    assert job.writer.path is not None
    data = job.writer.path.read_bytes()
    (run_dir / "cut.rank").write_bytes(data[: ring + 100])
    with pytest.raises(UnreadableRecordError, match="bytes of") as caught:
        read_rank(run_dir / "cut.rank", with_steps=True)
    assert caught.value.reason == "truncated"


def test_a_measured_step_has_its_number_its_end_its_sequence_number_and_its_phases(run_dir: Path) -> None:
    job = Job(run_dir)
    job.measure(7, end=1002.5, sequence=21, forward=0.5, collective_wait=0.25)
    (step,) = job.device_steps_after(0)
    assert (step.nth, step.number, step.end, step.sequence) == (1, 7, 1002.5, 21)
    assert (in_phase(step, "forward"), in_phase(step, "collective_wait")) == (0.5, 0.25)
    assert step.seconds == sum(step.phases) == 0.75


def test_only_the_measured_steps_after_the_given_one_are_read(run_dir: Path) -> None:
    job = Job(run_dir)
    assert job.device_steps_after(0) == []
    for number in range(1, 11):
        job.measure(16 * number, forward=1.0)
    assert [step.number for step in job.device_steps_after(7)] == [128, 144, 160]
    assert job.device_steps_after(10) == job.device_steps_after(11) == []


def test_overwritten_measured_steps_are_omitted(run_dir: Path) -> None:
    job = Job(run_dir)
    for number in range(1, 101):
        job.measure(number, forward=1.0)
    # The writer may be writing entry 101, which overwrites 69.
    assert [step.nth for step in job.device_steps_after(0)] == list(range(100 - layout.DEVICE_RING_STEPS + 2, 101))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 2.0**201])
@pytest.mark.parametrize("index", range(6))
def test_an_invalid_measured_step_is_omitted(run_dir: Path, value: float, index: int) -> None:
    job = Job(run_dir)
    for number in range(1, 6):
        job.measure(number, forward=1.0)
    job.writer.device_ring[3][index] = value
    assert [step.nth for step in job.device_steps_after(0)] == [1, 2, 4, 5]


def test_a_measured_step_without_any_time_is_omitted(run_dir: Path) -> None:
    job = Job(run_dir)
    job.measure(1)
    assert job.device_steps_after(0) == []


@pytest.mark.parametrize("value", [2.0**53, 2.0**62])
def test_a_forged_number_of_measured_steps_takes_no_time(run_dir: Path, value: float) -> None:
    job = Job(run_dir)
    job.measure(1, forward=1.0)
    job.writer.slots[DEVICE_STEPS] = value
    assert job.device_steps_after(0) == []


def test_without_the_rings_no_measured_step_is_read(run_dir: Path) -> None:
    job = Job(run_dir)
    job.measure(1, forward=1.0)
    assert job.writer.path is not None
    assert read_rank(job.writer.path).device_steps_after(0) == []
