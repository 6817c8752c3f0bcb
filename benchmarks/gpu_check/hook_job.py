"""One rank of a small DDP training on a GPU, with and without the hook; tells what it saw as JSON lines.

Started once a rank by hook.py with torchrun's variables; needs torch and the hook. On the CPU it trains too, and leaves
out what only a GPU can show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_check import trace
from benchmarks.hook_overhead import differences, interval, with_hook, without_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

import rankscope
from rankscope import attach, device_clock, guard, record
from rankscope.record import PLACES

SPIN = 10_000_000  # cycles: about 5 ms, the length of the communication that world size 1 has not
LATE = 0.02  # seconds by which the last of several ranks comes late to each step
CLASSES = 10
BATCHES = 8  # again and again
COPY_BYTES = PLACES["copy_bytes"]
MEMORY = ("cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_peak_allocated_bytes")


Batch = tuple[torch.Tensor, ...]


class Training:
    """A loop with what the probes watch, that itself never waits for the device until its end."""

    def __init__(self, device: torch.device, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self._device = device
        hidden = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        layers = torch.nn.Sequential(*hidden, torch.nn.Linear(width, CLASSES)).to(device)
        self.model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        made = [(torch.randn(batch, width), torch.randint(0, CLASSES, (batch,))) for _ in range(BATCHES)]
        batches = [tuple(map(torch.Tensor.pin_memory, one)) if device.type == "cuda" else one for one in made]
        self._loader = DataLoader(_Batches(batches), batch_size=None)
        self._batches = iter(self._loader)
        self.late = 0.0
        self.blocking = False  # copies to the device that the host waits for

    def slow_down(self) -> None:
        """Give world size 1 a communication: a stream of its own is busy for a while after the last gradients."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        # A lambda, for torch compares a hook's annotations, and here these are strings.
        self.model.register_comm_hook(stream, lambda state, bucket: _spin(state, bucket))

    def run(self, steps: int) -> float:
        """Seconds a step over `steps` steps and until the device is done."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - began) / steps

    def step(self) -> None:
        """One."""
        inputs, targets = (tensor.to(self._device, non_blocking=not self.blocking) for tensor in self._next())
        if self.late:
            time.sleep(self.late)
        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        with record_function("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Until the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def parameters(self) -> list[torch.Tensor]:
        """As they are now."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _next(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


class _Batches(Dataset[Batch]):
    """Made beforehand, and in pinned memory where that matters: fetching one costs the host next to nothing."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __getitem__(self, place: int) -> Batch:
        return self._batches[place]

    def __len__(self) -> int:
        return len(self._batches)


def _spin(stream: torch.cuda.Stream, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if bucket.is_last():
            torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's; there is no public one
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[gradients.device])
        future.set_result(gradients)
    return future


class Job:
    """The checks, each of a training of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = torch.device(options.device)

    def checks(self) -> list[Callable[[], dict[str, Any]]]:
        """Those that can be made here."""
        overhead = [self.overhead] if self._options.pairs else []
        if self._device.type != "cuda":
            return [self.identical, *overhead]
        # gloo copies gradients to the device, too.
        besides = [self.besides] if self._options.backend == "nccl" else []
        return [self.identical, *overhead, self.waiting, self.timeline, *besides]

    def identical(self) -> dict[str, Any]:
        """Whether the parameters are those of a training without the hook, and whether two of those agree."""
        plain, again = self._trained(), self._trained()
        rankscope.instrument()
        watched = self._trained()
        rankscope.uninstrument()
        return {"control": all(map(torch.equal, plain, again)), "hook": all(map(torch.equal, plain, watched))}

    def waiting(self) -> dict[str, Any]:
        """Synchronisations by call, of as many steps each; and what torch's own debug mode objects to."""
        device_clock.SECONDS_PER_MARK = 0.0  # each step is measured
        training = self._training()
        training.run(3)
        plain, control = (self._synchronisations(training) for _ in range(2))
        # gloo's own threads wait for the device: there it would break the all-reduce.
        objects = self._objection if self._options.backend == "nccl" else lambda _: ""
        objections = {"plain": objects(training)}
        rankscope.instrument()
        training.run(3)
        found = {"plain": plain, "control": control, "hook": self._synchronisations(training)}
        objections["hook"] = objects(training)
        rankscope.uninstrument()
        return {"calls": found, "objections": objections}

    def timeline(self) -> dict[str, Any]:
        """The device's time by phase beside the profiler's timeline and the wall clock."""
        device_clock.SECONDS_PER_MARK = 0.0
        training = self._training()
        if dist.get_world_size() == 1:
            training.slow_down()
        elif dist.get_rank() == dist.get_world_size() - 1:
            training.late = LATE
        training.run(3)
        rankscope.instrument()
        training.run(1)  # start-up ends: the clock starts
        attachment = attach.current()
        assert attachment is not None
        began = time.perf_counter()
        events, ended = self._traced(training)
        rankscope.uninstrument()
        slots = attachment.writer.slots
        place = PLACES["device_seconds"]
        device = dict(zip(record.PHASES, slots[place : place + len(record.PHASES)].tolist(), strict=True))
        return {
            "device": device,
            "wall": ended - began,
            "profiler_waits": trace.waits_before(events, "optimizer"),
        }

    def besides(self) -> dict[str, Any]:
        """Copies that block, beside those that the profiler saw, and the allocator's figures beside torch's."""
        training = self._training()
        training.blocking = True
        rankscope.instrument()
        training.run(3)
        attachment = attach.current()
        assert attachment is not None
        slots = attachment.writer.slots
        before = slots[COPY_BYTES]
        events, _ = self._traced(training)
        ours = {"copy_bytes": slots[COPY_BYTES] - before, **{name: slots[PLACES[name]] for name in MEMORY}}
        rankscope.uninstrument()
        memory = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
        theirs = {"copy_bytes": trace.uploaded_bytes(events), **dict(zip(MEMORY, memory, strict=True))}
        return {"ours": ours, "theirs": theirs}

    def overhead(self) -> dict[str, Any]:
        """Microseconds a step, median and its 95 % interval: as it is, with every step measured, and the control."""
        usual, training = device_clock.SECONDS_PER_MARK, self._training(width=64, batch=16)
        found: dict[str, Any] = {"step": 1e6 * statistics.median(training.run(100) for _ in range(5))}
        for name, treated, seconds in (
            ("hook", with_hook, usual),
            ("hook, every step measured", with_hook, 0.0),
            ("control", without_hook, usual),
        ):
            device_clock.SECONDS_PER_MARK = seconds
            found[name] = [1e6 * value for value in interval(self._differences(training, treated))]
        device_clock.SECONDS_PER_MARK = usual
        return found

    def _differences(self, training: Training, treated: Callable[[Any, int], float]) -> list[float]:
        trained: Any = training  # with the one method that is asked for
        return differences(trained, self._options.pairs, 100, treated)

    def _training(self, width: int = 0, batch: int = 0) -> Training:
        options = self._options
        return Training(self._device, width or options.width, batch or options.batch)

    def _trained(self) -> list[torch.Tensor]:
        training = self._training()
        training.run(self._options.steps)
        return training.parameters()

    def _synchronisations(self, training: Training) -> dict[str, int]:
        return trace.synchronisations(self._traced(training)[0])

    def _objection(self, training: Training) -> str:
        """What torch says when it is to refuse every wait for the device; nothing, if there is none."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(self._options.steps):
                training.step()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def _traced(self, training: Training) -> tuple[list[trace.Event], float]:
        """The events of some steps, and when the device was done with them."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(self._options.steps):
                training.step()
            training.synchronize()
            ended = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "trace.json")
            profiler.export_chrome_trace(str(path))
            events: list[trace.Event] = json.loads(path.read_text())["traceEvents"]
        return events, ended


def say(told: Mapping[str, Any]) -> None:
    """A line, at once."""
    print(json.dumps(told), flush=True)


def main() -> None:
    """Every check of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        say({"skipped": f"torch {torch.__version__} sees no GPU"})
        return
    guard.reraise = True
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    job = Job(options)
    for check in job.checks():
        say({"check": check.__name__, "rank": dist.get_rank(), **check()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
