"""One rank of a small training on a GPU, with and without the hook; tells what it saw as JSON lines.

Started once a rank by hook.py with torchrun's variables; needs torch and the hook. On the CPU it trains too, and leaves
out what only a GPU can show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from benchmarks.hook_overhead.in_process import alternating
from testing.statistics import median_interval as interval
from torch.profiler import ProfilerActivity, profile
from validation.gpu_check import trace
from validation.gpu_check.hook_training import OPTIMIZER, Training
from validation.gpu_check.hook_ways import WAYS, UnavailableError

import rankscope
from rankscope import attach, guard
from rankscope.record import layout
from rankscope.record.layout import FIELDS, INDEX
from rankscope.record.reader import read_rank
from rankscope.timeline import device_clock

LATE = 0.02  # seconds by which the last of several ranks comes late to each step
MOST_STEPS = 30  # that a device ring holds and one reading gives
PAUSE = 0.01  # seconds of the host's after each step, with nothing for the device to do
TINY = {"width": 64, "batch": 16}  # a training of which the device has next to nothing to do
MANY = 300  # steps, for what is measured seldom
SELDOM = 12.0  # how many steps go by for one that is measured, about
MARKS = 10  # of a step, about: where data wait, forward, backward, collective wait and optimizer begin and end
SETTLED = 1.0  # seconds after which the clock has found out how often it may measure
USUAL = 6.0  # seconds in which marks are counted
MEMORY = ("cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_peak_allocated_bytes")

Told = dict[str, Any]
Found = TypeVar("Found")


class Job:
    """The checks, each of a training of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = torch.device(options.device)

    def checks(self) -> list[Callable[[], Told]]:
        """Those that are asked for and can be made here, what tells most first."""
        only = self._options.only
        return [check for check in self._possible() if only in ("", check.__name__)]

    def _possible(self) -> list[Callable[[], Told]]:
        overhead = [self.overhead] if self._options.pairs else []
        if self._device.type != "cuda":
            return [self.identical, *overhead]
        # gloo copies gradients to the device, and waits for it; the rest is asked once.
        is_the_simplest = self._options.backend == "nccl" and self._options.way == "ddp"
        once = [self.gaps, self.sampling, self.besides] if is_the_simplest else []
        return [self.timeline, self.waiting, self.identical, *once, *overhead]

    def identical(self) -> Told:
        """Whether the parameters are those of a training without the hook, and whether two of those agree."""
        plain, again = self._trained(), self._trained()
        rankscope.instrument()
        watched = self._trained()
        rankscope.uninstrument()
        return {"control": all(map(torch.equal, plain, again)), "hook": all(map(torch.equal, plain, watched))}

    def waiting(self) -> Told:
        """Synchronisations by call, of as many steps each; and what torch's own debug mode objects to."""
        training = self._training()
        training.run(3)
        plain, control = (self._synchronisations(training) for _ in range(2))
        # gloo's own threads wait for the device: there it would break the all-reduce.
        objects = self._objection if self._options.backend == "nccl" else str
        objections = {"plain": objects()}
        with every_step():
            rankscope.instrument()
            training.run(3)
            found = {"plain": plain, "control": control, "hook": self._synchronisations(training)}
            objections["hook"] = objects()
            rankscope.uninstrument()
        return {"calls": found, "objections": objections}

    def timeline(self) -> Told:
        """Some steps by both clocks, beside the profiler's timeline, the wall clock, and what the job itself did.

        One rank alone has a communication that takes long, and reads its loss; of several one comes late.
        """
        training, issued = self._training(), Counter[str]()
        is_alone = dist.get_world_size() < 2  # `_communicate_alone` lets it be no 1
        training.reads = is_alone
        if not is_alone and dist.get_rank() == dist.get_world_size() - 1:
            training.late = LATE
        with every_step(), training.slowed(issued) if is_alone else nullcontext():
            training.run(3)
            rankscope.instrument()
            training.run(1)  # start-up ends: the clock starts
            began = time.perf_counter()
            events, (ended, host, asked) = traced(lambda: self._watched_steps(training, issued))
            path = record_path()
            rankscope.uninstrument()
        found = read_rank(path, with_steps=True)
        waits = trace.stalls if is_alone else trace.waits_before
        return {
            "is_alone": is_alone,
            "wall": ended - began,
            "device": by_phase(found.many("device_seconds")),
            "steps": [step.seconds for step in found.device_steps_after(0)],
            "profiler_steps": trace.steps(events, OPTIMIZER),
            "profiler_waits": waits(events, OPTIMIZER),
            **host,
            **asked,
        }

    def gaps(self) -> Told:
        """Of trainings whose device has always something to do, and seldom, and never: what was found dry, by phase."""
        busy, tiny, pausing = self._training(), self._training(**TINY), self._training(**TINY)
        pausing.pause = PAUSE
        found = {"busy": self._dry(busy), "launch-bound": self._dry(tiny), "pausing": self._dry(pausing)}
        return {"found": found, "paused": PAUSE * self._options.steps}

    def sampling(self) -> Told:
        """Steps that are measured seldom: their numbers, and how long the host's clock says that they were."""
        training = self._training(**TINY)
        training.reads = True  # so that the host's steps are as long as the device's
        usual = training.run(MANY)
        with every_step(SELDOM * usual / MARKS):
            rankscope.instrument()
            training.run(MANY)
            path = record_path()
            rankscope.uninstrument()
        found = read_rank(path, with_steps=True)
        lengths = {step.number: step.seconds for step in found.steps_after(0)}
        measured = found.device_steps_after(0)
        both = [step for step in measured if step.number in lengths]
        return {
            "numbers": [step.number for step in measured],
            "device": sum(step.seconds for step in both),
            "host": sum(lengths[step.number] for step in both),
            "step": usual,
        }

    def besides(self) -> Told:
        """Copies that block, beside those that the profiler saw, and the allocator's figures beside torch's."""
        training = self._training()
        training.blocking = True
        rankscope.instrument()
        training.run(3)
        slots = current().writer.slots
        before = slots[INDEX["copy_bytes"]]
        events, _ = traced(lambda: self._steps(training))
        ours = {"copy_bytes": slots[INDEX["copy_bytes"]] - before, **{name: slots[INDEX[name]] for name in MEMORY}}
        rankscope.uninstrument()
        memory = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
        theirs = {"copy_bytes": trace.uploaded_bytes(events), **dict(zip(MEMORY, memory, strict=True))}
        return {"ours": ours, "theirs": theirs}

    def overhead(self) -> Told:
        """Microseconds a step, median and its 95 % interval: as it is, with every step measured, and the control."""
        training = self._training(**TINY)
        found: Told = {"step": 1e6 * statistics.median(training.run(self._options.block) for _ in range(5))}
        found |= self._marks(training)
        plain, hooked = partial(self._block, training), partial(self._hooked_block, training)
        for name, treated, clock in (
            ("hook", hooked, nullcontext()),
            ("hook, every step measured", hooked, every_step()),
            ("control", plain, nullcontext()),
        ):
            with clock:
                pairs = alternating(self._options.pairs, plain, treated)
            found[name] = [1e6 * value for value in interval([second - first for first, second in pairs])]
        return found

    def _marks(self, training: Training) -> Told:
        """Of the device's clock: so many in a step that is measured, and in a second."""
        if self._device.type != "cuda":
            return {}
        with counted_marks() as marks:
            with every_step():
                rankscope.instrument()
                training.run(1)
                before = marks["all"]
                training.run(self._options.block)
                in_a_step = (marks["all"] - before) / self._options.block
                rankscope.uninstrument()
            rankscope.instrument()
            train_for(SETTLED, training)
            before, began = marks["all"], time.perf_counter()
            train_for(USUAL, training)
            in_a_second = (marks["all"] - before) / (time.perf_counter() - began)
            rankscope.uninstrument()
        return {"marks in a step": in_a_step, "marks in a second": in_a_second, "seconds": USUAL}

    def _block(self, training: Training) -> float:
        training.warm_up()
        return training.run(self._options.block)

    def _hooked_block(self, training: Training) -> float:
        rankscope.instrument()
        seconds = self._block(training)
        rankscope.uninstrument()
        return seconds

    def _training(self, width: int = 0, batch: int = 0) -> Training:
        options = self._options
        return Training(self._device, width or options.width, batch or options.batch, options.way)

    def _trained(self) -> list[torch.Tensor]:
        training = self._training()
        training.run(self._options.steps)
        return training.parameters()

    def _steps(self, training: Training) -> float:
        """Make them; when the device was done."""
        for _ in range(self._options.steps):
            training.step()
        training.synchronize()
        return time.perf_counter()

    def _watched_steps(self, training: Training, issued: Counter[str]) -> tuple[float, Told, Told]:
        """When the device was done, what the record has counted of these steps by then, and what the job has."""
        slots = current().writer.slots
        before = slots.tolist()
        issued.clear()
        training.waits, training.waited = 0, 0.0
        ended = self._steps(training)
        grown = [after - earlier for after, earlier in zip(slots.tolist(), before, strict=True)]
        host = {
            "host": by_phase(many(grown, "phase_seconds")),
            "collectives": {op: n for op, n in zip(layout.OPS, many(grown, "collectives"), strict=True) if n},
            "device_waits": grown[INDEX["device_waits"]],
        }
        return ended, host, {"issued": dict(issued), "waits": training.waits, "waited": training.waited}

    def _dry(self, training: Training) -> Told:
        with every_step():
            training.run(MARKS)
            rankscope.instrument()
            training.run(1)
            training.run(self._options.steps)
            path = record_path()
            rankscope.uninstrument()
        found = read_rank(path)
        dry = {phase: seconds for phase, seconds in by_phase(found.many("device_dry_seconds")).items() if seconds}
        return {"dry": dry, "device": sum(found.many("device_seconds"))}

    def _synchronisations(self, training: Training) -> dict[str, int]:
        return trace.synchronisations(traced(lambda: self._steps(training))[0])

    def _objection(self) -> str:
        """What torch says when it is to refuse every wait for the device; nothing, if there is none."""
        training = self._training()
        training.run(3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(self._options.steps):
                training.step()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""


@contextmanager
def every_step(seconds_per_mark: float = 0.0) -> Iterator[None]:
    """Each step is measured by the device's clock, or as many as so many marks allow."""
    usual, device_clock.SECONDS_PER_MARK = device_clock.SECONDS_PER_MARK, seconds_per_mark
    try:
        yield
    finally:
        device_clock.SECONDS_PER_MARK = usual


@contextmanager
def counted_marks() -> Iterator[Counter[str]]:
    """Within, `all` the marks that the device's clock puts."""
    marks, made = Counter[str](), device_clock.Mark

    def count(*arguments: Any) -> device_clock.Mark:
        marks["all"] += 1
        return made(*arguments)

    device_clock.Mark = count  # type: ignore[misc,assignment]  # a function that counts, in place of the class
    try:
        yield marks
    finally:
        device_clock.Mark = made  # type: ignore[misc]  # the class again


def traced(run: Callable[[], Found]) -> tuple[list[trace.Event], Found]:
    """The profiler's events of what runs, and what that gives."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        found = run()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[trace.Event] = json.loads(path.read_text())["traceEvents"]
    return events, found


def train_for(seconds: float, training: Training) -> None:
    """Until so many have gone by."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        training.run(MARKS)


def current() -> attach.Attachment:
    """What the hook has put into this process."""
    attachment = attach.current()
    assert attachment is not None
    return attachment


def record_path() -> Path:
    """Where the rank's record is, and stays once the hook is gone."""
    path = current().writer.path
    assert path is not None
    return path


def many(slots: Sequence[float], field: str) -> Sequence[float]:
    """All places of a field, as `RankSnapshot.many`."""
    return slots[INDEX[field] : INDEX[field] + FIELDS[field]]


def by_phase(seconds: Sequence[float]) -> dict[str, float]:
    """By the record's phases: this training has none of its own."""
    return dict(zip(layout.PHASES, seconds, strict=False))


def say(told: Mapping[str, Any]) -> None:
    """A line, at once."""
    print(json.dumps(told), flush=True)


def attempt(check: Callable[[], Told], rank: int) -> Told:
    """What a check tells, or why it cannot: the others are worth having."""
    try:
        return {"check": check.__name__, "rank": rank, **check()}
    except UnavailableError:
        raise
    except Exception as error:
        rankscope.uninstrument()
        return {"failed": f"{check.__name__}, rank {rank}: {type(error).__name__}: {error}"}


def main() -> None:
    """Every check of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", default="ddp", choices=WAYS)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    parser.add_argument("--only", default="", help="a check; all of them without it")
    parser.add_argument("--pairs", type=int, default=0, help="of blocks, for the cost")
    parser.add_argument("--block", type=int, default=100, help="steps of a block")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        say({"no_gpu": f"torch {torch.__version__} sees no GPU"})
        return
    guard.reraise = True
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    job = Job(options)
    try:
        for check in job.checks():
            say(attempt(check, dist.get_rank()))
    except UnavailableError as error:
        say({"skipped": str(error)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
