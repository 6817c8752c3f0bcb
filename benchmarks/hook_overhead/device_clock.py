"""Measure the cost of the device's clock on the host, without a device.

    python -m benchmarks.hook_overhead.device_clock --pairs 100 --save

The step is that of DDP in `benchmarks.hook_overhead.in_process`, in pairs of blocks with the hook. In one block torch
has no device, in the other a device whose events take no time. So this measures the hook's own Python code; `make
gpu-check` measures the driver's time for an event on a GPU. It runs as shipped, with few steps measured, and with
every step measured, which gives the cost of one mark. Steps of 20 ms show how many marks there are a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.hook_overhead import in_process
from benchmarks.hook_overhead.child import join
from benchmarks.hook_overhead.in_process import Block, Loop, alternating, differences, full_speed, microseconds, span
from benchmarks.hook_overhead.trainings import Ddp
from testing import report

import rankscope
from rankscope import attach
from rankscope.record.layout import INDEX
from rankscope.timeline import device_clock

LONG_STEP = 0.02  # seconds, of the steps in which the marks of a second are counted
STREAM = SimpleNamespace(device="cuda:0")


class Event:
    """An event like torch.cuda.Event, of a device that is always done."""

    marks = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._at = 0.0

    def record(self, _stream: object = None) -> None:
        Event.marks += 1
        self._at = time.monotonic()

    def wait(self, _stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the device has always passed the event."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds."""
        return (end_event._at - self._at) * 1000


class Stream:
    """A stand-in for torch.cuda.Stream; this benchmark creates none."""

    def synchronize(self) -> None:
        """Return at once."""


@contextmanager
def fake_device() -> Iterator[None]:
    """Give torch.cuda events that take no time until the block ends."""
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_stream", lambda: STREAM),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda _device=None: SimpleNamespace(uuid="")),
        (torch.cuda, "memory_stats_as_nested_dict", lambda _device=None: {}),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", Stream),
    )
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    yield
    for (owner, name, _), original in zip(stand_ins, before, strict=True):
        setattr(owner, name, original)


def with_clock(loop: Loop, seconds_per_mark: float) -> Callable[[], Block]:
    """Return a function that runs a block with the hook and the fake device."""

    def block() -> Block:
        device_clock.SECONDS_PER_MARK = seconds_per_mark
        with fake_device():
            return loop.with_hook()

    return block


def marks_a_second(training: Ddp, seconds: float) -> tuple[float, float]:
    """Return the marks a second in steps of LONG_STEP, and the marks of a measured step."""
    training.sleep = LONG_STEP
    with fake_device():
        rankscope.instrument()
        loop = Loop(training, 1)
        loop.warm_up()
        loop.run(2)  # the first step's marks set the level
        attachment = attach.current()
        assert attachment is not None
        slots = attachment.writer.slots
        began, marks, steps = time.perf_counter(), Event.marks, slots[INDEX["device_steps"]]
        loop.run(round(seconds / LONG_STEP))
        elapsed, marks = time.perf_counter() - began, Event.marks - marks
        steps = slots[INDEX["device_steps"]] - steps
        rankscope.uninstrument()
    training.sleep = 0.0
    return marks / elapsed, marks / steps


def measure(pairs: int, seconds: float) -> dict[str, Any]:
    """Return all figures, times in microseconds."""
    usual = device_clock.SECONDS_PER_MARK
    join(Ddp.ranks)
    training = Ddp()
    rate, marks = marks_a_second(training, seconds)
    loop = Loop(training, in_process.STEPS)
    loop.without_hook()
    sampled = alternating(pairs, loop.with_hook, with_clock(loop, usual))
    every = alternating(pairs, loop.with_hook, with_clock(loop, 0.0))
    control = alternating(pairs, loop.with_hook, loop.with_hook)
    device_clock.SECONDS_PER_MARK = usual
    dist.destroy_process_group()
    hooked = [step for pair in control for block in pair for step in block]
    limit = full_speed(hooked)
    found = differences(every, limit)
    return {
        "step_us": microseconds(statistics.median(step.seconds for step in hooked if step.reference <= limit)),
        "sampled_us": span(differences(sampled, limit)),
        "every_step_us": span(found),
        "control_us": span(differences(control, limit)),
        "marks_a_step": round(marks, 1),
        "a_mark_us": microseconds(statistics.median(found) / marks) if found else None,
        "marks_a_second": round(rate, 2),
        "pairs": pairs,
    }


def table(figures: dict[str, Any]) -> str:
    rows = (
        ("step with the hook, without a device (µs)", f"{figures['step_us']:.0f}"),
        ("device clock, few steps measured (µs a step)", report.text(figures["sampled_us"])),
        ("device clock, every step measured (µs a step)", report.text(figures["every_step_us"])),
        ("control: the same twice (µs a step)", report.text(figures["control_us"])),
        ("marks of a measured step", figures["marks_a_step"]),
        ("a mark (µs), without the driver's part", figures["a_mark_us"]),
        (f"marks a second, in steps of {LONG_STEP * 1000:.0f} ms", figures["marks_a_second"]),
    )
    return report.table(("", f"{figures['pairs']} pairs of blocks"), rows)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks of each kind (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for counting marks (%(default)s)")
    options = parser.parse_args()
    with in_process.run_directory():
        found = measure(options.pairs, options.seconds)
    title, bound = "Cost of the device's clock on the host", "at most 10 marks a second"
    report.Report("hook_overhead_device_clock", title, __doc__, bound, [table(found)], found, ["torch"]).publish(
        options.save
    )


if __name__ == "__main__":
    main()
