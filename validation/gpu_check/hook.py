"""The hook on the GPU: small trainings with and without it, and its clocks compared with known waits.

A group of one rank has no communication to wait for, so its communication is made slow: the communicating stream sleeps
on the device, below the hook's patches, and CUDA events measure how long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from validation.gpu_check import dry_run
from validation.gpu_check.report import Check, judge, ok_if, show

import rankscope
from rankscope import attach, guard
from rankscope.patch import replace
from rankscope.probes.collectives import METHODS
from rankscope.record.layout import FIELDS, INDEX, PHASES
from rankscope.record.reader import read_rank
from rankscope.timeline import device_clock

STEPS = 12
WIDTH, BATCH = 64, 16  # small, so that the device waits for the delays most of the time
CYCLES = 10_000_000  # a delay: about 5 ms
LATE = 0.05  # seconds by which the second rank of two is late in each step
HOST = 3e-4  # seconds that the host needs between two calls
TOLERANCE = 0.1  # ratio of the delays
BLOCKED = 0.1  # maximum of the host's wait, as a ratio of the device's
WARM_UP = 130  # steps: the record is published, and the search for root modules in step 100 is over
PAIRS, BLOCK = 15, 100  # pairs of blocks and steps of a block, for the costs


class SizeOne(int):
    """A world size of 1 that does not compare as 1: from torch 2.9, FSDP2 does not communicate if it is 1."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return True


@cache
def make_mesh(device: str) -> DeviceMesh:
    """Make a mesh of this rank alone, in which FSDP2 communicates."""
    mesh = init_device_mesh(device, (1,))
    replace(dist.ProcessGroup, "size", lambda original: lambda group: SizeOne(original(group)))
    return mesh


delays: list[tuple[Any, Any]] | None = None
"""The start and end events of each delay; None while there are no delays."""


def delay() -> None:
    """Let the current stream sleep on the device, if there are delays."""
    if delays is not None:
        cuda: Any = torch.cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        cuda._sleep(CYCLES)
        end.record()
        delays.append((begin, end))


def slow(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that makes the current stream sleep afterwards."""

    def slowed(*arguments: Any) -> Any:
        work = original(*arguments)
        delay()
        return work

    return slowed


@cache
def slow_down(operation: str) -> None:
    """Make each collective of this kind that Python issues slow, permanently in this process."""
    for name, (known, _) in METHODS.items():
        if known == operation and hasattr(dist.ProcessGroup, name):
            replace(dist.ProcessGroup, name, slow)


class Training:
    """A small training, which reads each loss while there are delays."""

    def __init__(self, way: str, device: str) -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.model: torch.nn.Module = torch.nn.Sequential(*hidden, torch.nn.Linear(WIDTH, 10)).to(device)
        self.inputs = torch.randn(BATCH, WIDTH).to(device)
        self.targets = torch.randint(0, 10, (BATCH,)).to(device)
        self.stream = torch.cuda.Stream()
        self.by_hand = way == "by_hand"
        self.late = self.waited = 0.0
        if way == "fsdp2":
            self._shard()
        elif way == "by_hand":
            slow_down("all_reduce")
        else:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if way == "ddp":  # C++ issues the all-reduce, so a communication hook replaces it
            self.model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))  # type: ignore[operator]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def run(self, steps: int = STEPS) -> float:
        """Return the seconds of these steps, until the device has finished them."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait(torch.cuda.synchronize)
        return time.perf_counter() - began

    def _step(self) -> None:
        time.sleep(self.late)
        loss = torch.nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()
        if self.by_hand:
            self._average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if delays is not None:
            self._wait(loss.item)

    def _wait(self, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.waited += time.perf_counter() - began

    def _average(self) -> None:
        """Reduce the gradients in a separate stream, which the main stream then waits for."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _shard(self) -> None:
        slow_down("all_gather")
        mesh = make_mesh(self.inputs.device.type)
        for layer in [each for each in self.model.children() if isinstance(each, torch.nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(self.model, mesh=mesh)
        if hasattr(sharded, "set_force_sum_reduction_for_comms"):  # from torch 2.9; NCCL cannot average one rank
            sharded.set_force_sum_reduction_for_comms(True)

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if bucket.is_last():
                delay()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
            future.set_result(bucket.buffer())
        return future


def check(way: str) -> Iterator[Check]:
    """Yield the checks of a way to train, or the costs of the hook."""
    guard.reraise = True
    torch.use_deterministic_algorithms(True)
    with dry_run.device():
        dist.init_process_group(backend(way))
        if way == "cost":
            yield from costs(Training("plain", dry_run.DEVICE))
        else:
            yield from clocks(way, dry_run.DEVICE)
            yield identical(way, dry_run.DEVICE)
        dist.destroy_process_group()


def backend(way: str) -> str:
    """Return the backend: NCCL refuses two ranks on one GPU; the asynchronous device has its own."""
    if not dry_run.IS_DRY:
        return "gloo" if way == "gloo" else "nccl"
    from testing.asynchronous_device import BACKEND

    return BACKEND


def clocks(way: str, device: str) -> Iterator[Check]:
    """Compare the clocks of host and device with the delays, the wall clock and the job's own waits."""
    global delays  # the patched collectives read it
    training = Training(way, device)
    training.late, delays = LATE * dist.get_rank(), None if way == "gloo" else []
    with patch.object(device_clock, "SECONDS_PER_MARK", 0.0):  # every step is measured
        training.run(3)
        rankscope.instrument()
        training.run(1)  # start-up ends: the device clock starts
        attachment = attach.current()
        assert attachment
        before, path, training.waited = attachment.writer.slots.tolist(), attachment.writer.path, 0.0
        delays = None if delays is None else []
        wall = training.run()
        grown = [after - b for after, b in zip(attachment.writer.slots.tolist(), before, strict=True)]
        rankscope.uninstrument()
    known = sum(begin.elapsed_time(end) for begin, end in delays or ()) / 1000
    delays = None
    assert path
    slots = read_rank(path).slots
    device_seconds, host = by_phase(slots, "device_seconds"), by_phase(grown, "phase_seconds")
    yield judge("device: steps", [slots[INDEX["device_steps"]]], STEPS)
    yield judge("device: all phases", [sum(device_seconds.values())], wall, 0.01 * wall + HOST, "the wall clock")
    yield from judge_waits(device_seconds["collective_wait"], host, known, training.waited)
    for name, seconds in (("host", host), ("device", device_seconds), ("dry", by_phase(slots, "device_dry_seconds"))):
        shown = ", ".join(f"{phase} {show(value)}" for phase, value in seconds.items() if value)
        yield Check(f"{name}: seconds by phase", "measured", shown)


def judge_waits(waited: float, host: Mapping[str, float], known: float, own: float) -> Iterator[Check]:
    """Judge the waits of device and host: for one rank by the delays, for two by the delay of one of them."""
    if not known:
        late = LATE * STEPS * (1 - dist.get_rank())
        yield judge("device: collective_wait", [waited], late, 0.25 * LATE * STEPS, "the other rank is late")
        return
    yield judge("device: collective_wait", [waited], known, TOLERANCE * known, "the delays, by CUDA events")
    shown = show(host["collective_wait"]), f"at most {show(BLOCKED * waited)}"
    yield Check("host: collective_wait", ok_if(host["collective_wait"] <= BLOCKED * waited), *shown)
    slack = 0.02 * own + HOST * (STEPS + 1)
    yield judge("host: device_wait", [host["device_wait"]], own, slack, "the job's own clock")


def by_phase(slots: Sequence[float], field: str) -> dict[str, float]:
    """Return a field's seconds by phase."""
    return dict(zip(PHASES, slots[INDEX[field] : INDEX[field] + FIELDS[field]], strict=False))


def identical(way: str, device: str) -> Check:
    """Check that the parameters are the same bits with and without the hook."""
    plain, again = parameters(way, device), parameters(way, device)
    rankscope.instrument()
    hooked = parameters(way, device)
    rankscope.uninstrument()
    same, repeats = (all(map(torch.equal, plain, other)) for other in (hooked, again))
    shown = f"identical: {same}", f"without the hook twice: {repeats}"
    return Check("parameters with the hook", ok_if(same) if repeats else "measured", *shown)


def parameters(way: str, device: str) -> list[torch.Tensor]:
    """Train, and return this rank's part of the parameters."""
    training = Training(way, device)
    training.run()
    parts: Iterator[Any] = (parameter.detach() for parameter in training.model.parameters())
    return [part.to_local() if hasattr(part, "to_local") else part for part in parts]


def costs(training: Training) -> Iterator[Check]:
    """Yield the microseconds per step and per mark of the device clock."""
    plain = statistics.median(run_block(training) for _ in range(PAIRS))
    yield Check("a step without the hook", "measured", f"{1e6 * plain:.0f} µs")
    yield from cost("nothing (the control)", training, run_block)
    sampled = yield from cost("the hook", training, run_hooked_block)
    with patch.object(device_clock, "SECONDS_PER_MARK", 0.0):
        full = yield from cost("the hook, every step measured", training, run_hooked_block)
        with patch.object(device_clock, "Mark", wraps=device_clock.Mark) as mark:
            run_hooked_block(training)
    marks = mark.call_count / (WARM_UP + BLOCK)
    yield Check("cost of a mark", "measured", f"{(full - sampled) / marks:.1f} µs", note=f"{marks:.1f} marks a step")


def cost(about: str, training: Training, block: Callable[[Training], float]) -> Generator[Check, None, float]:
    """Yield and return the median of the additional microseconds of a block's step."""
    differences = [1e6 * (block(training) - run_block(training)) for _ in range(PAIRS)]
    low, median, high = statistics.quantiles(differences, n=4)
    yield Check(f"cost of {about}", "measured", f"{median:+.1f} µs a step", note=f"quartiles {low:+.1f}, {high:+.1f}")
    return median


def run_block(training: Training) -> float:
    """Return the seconds of a step."""
    training.run(WARM_UP)
    return training.run(BLOCK) / BLOCK


def run_hooked_block(training: Training) -> float:
    """Return the seconds of a step with the hook."""
    rankscope.instrument()
    seconds = run_block(training)
    rankscope.uninstrument()
    return seconds
