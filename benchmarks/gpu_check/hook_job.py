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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_check import trace
from benchmarks.gpu_check.hook_training import OPTIMIZER, Training
from benchmarks.hook_overhead.in_process import alternating, interval
from torch.profiler import ProfilerActivity, profile

import rankscope
from rankscope import attach, device_clock, guard, record
from rankscope.record import PLACES

LATE = 0.02  # seconds by which the last of several ranks comes late to each step
COPY_BYTES = PLACES["copy_bytes"]
MEMORY = ("cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_peak_allocated_bytes")


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
            "profiler_waits": trace.waits_before(events, OPTIMIZER),
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
        found: dict[str, Any] = {"step": 1e6 * statistics.median(training.run(self._options.block) for _ in range(5))}
        plain, hooked = partial(self._block, training), partial(self._hooked_block, training)
        for name, treated, seconds in (
            ("hook", hooked, usual),
            ("hook, every step measured", hooked, 0.0),
            ("control", plain, usual),
        ):
            device_clock.SECONDS_PER_MARK = seconds
            pairs = alternating(self._options.pairs, plain, treated)
            found[name] = [1e6 * value for value in interval([second - first for first, second in pairs])]
        device_clock.SECONDS_PER_MARK = usual
        return found

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
    parser.add_argument("--pairs", type=int, default=40, help="of blocks, for the cost")
    parser.add_argument("--block", type=int, default=100, help="steps of a block")
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
