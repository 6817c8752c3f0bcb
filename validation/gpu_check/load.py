"""The known load: phases of which device time, bytes and operations are known, in a process of its own.

Needs torch and nothing of ours. Tells on standard output, as a JSON line each, what it is, and when each phase begins
and ends and what it did: by CUDA events, so without the time in which the GPU waited for us.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Work = Callable[[], object]
GIBIBYTE = 2**30
GAP = 4.0  # seconds of nothing before each phase, so that readings a second or two late still tell phases apart


@dataclass(frozen=True)
class Phase:
    """Work for `on` seconds, then none for `off` seconds, again and again; with `seconds` 0 just once."""

    name: str
    work: str
    seconds: float
    on: float = 0.5
    off: float = 0.0


PHASES = (
    Phase("hold memory", "hold", 4, on=4),
    Phase("bf16", "bf16", 20),
    Phase("bf16, half the time", "bf16", 20, on=0.1, off=0.1),
    Phase("bf16, 50 ms every second", "bf16", 20, on=0.05, off=0.95),
    Phase("fp32", "fp32", 10),
    Phase("upload once", "upload", 0, on=0),
    Phase("upload", "upload", 6),
    Phase("copy", "copy", 8),
    Phase("idle", "idle", 10, on=10),
)


@dataclass(frozen=True)
class Sizes:
    """Of square matrices, and of what is copied or held, in bytes."""

    matrix: int = 8192
    chunk: int = GIBIBYTE
    held: int = 4 * GIBIBYTE


class Gpu:
    """What there is to do on a device, and how long it takes there."""

    def __init__(self, torch: Any, device: str, sizes: Sizes) -> None:
        torch.set_float32_matmul_precision("highest")  # fp32 is to keep off the tensor cores
        self._torch = torch
        self._device = device
        self._sizes = sizes
        self.timed = self._timed_by_events if device == "cuda" else self._timed_by_clock
        self.makers: Mapping[str, Callable[[], Work]] = {
            "bf16": lambda: self._product(torch.bfloat16),
            "fp32": lambda: self._product(torch.float32),
            "upload": self._upload,
            "copy": self._copy,
        }
        products = 2 * sizes.matrix**3
        self.flops = {"bf16": products, "fp32": products}
        self.bytes = {"upload": sizes.chunk, "copy": sizes.chunk, "hold": sizes.held}

    def describe(self) -> dict[str, Any]:
        """Name and UUID of the device, and who we are."""
        told = {"pid": os.getpid(), "torch": self._torch.__version__, "uuid": "", "device": "cpu"}
        if self._device == "cuda":
            properties = self._torch.cuda.get_device_properties(0)
            told |= {"uuid": f"GPU-{getattr(properties, 'uuid', '')}", "device": properties.name}
        return told

    def hold(self, seconds: float, sleep: Callable[[float], None]) -> None:
        """Have a tensor of a known size, and then not."""
        held = self._torch.empty(self._sizes.held, dtype=self._torch.uint8, device=self._device)
        sleep(seconds)
        del held
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def _upload(self) -> Work:
        host = self._torch.ones(self._sizes.chunk, dtype=self._torch.uint8, pin_memory=self._device == "cuda")
        there = self._torch.empty(self._sizes.chunk, dtype=self._torch.uint8, device=self._device)
        return lambda: there.copy_(host, non_blocking=True)

    def _copy(self) -> Work:
        one, other = (
            self._torch.ones(self._sizes.chunk, dtype=self._torch.uint8, device=self._device) for _ in range(2)
        )
        return lambda: other.copy_(one)

    def _product(self, dtype: torch.dtype) -> Work:
        size = self._sizes.matrix
        left, right, product = (self._torch.randn(size, size, device=self._device).to(dtype) for _ in range(3))
        return lambda: self._torch.matmul(left, right, out=product)

    def _timed_by_events(self, work: Work, times: int) -> float:
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _timed_by_clock(self, work: Work, times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - begun


class Load:
    """Runs phases."""

    def __init__(self, gpu: Gpu, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._gpu = gpu
        self._clock = clock
        self._sleep = sleep
        self._works: dict[str, Work] = {}
        self._each: dict[str, float] = {}

    def warm_up(self, work: str) -> None:
        """How long this work takes, once its kernels are loaded. Raises what torch raises."""
        do = self._gpu.makers[work]()
        self._gpu.timed(do, 3)
        self._each[work] = self._gpu.timed(do, 5) / 5
        self._works[work] = do

    def run(self, phase: Phase) -> dict[str, Any]:
        began, busy, times = self._clock(), 0.0, 0
        while True:
            stretch, count = self._stretch(phase)
            busy, times = busy + stretch, times + count
            if self._clock() - began + phase.off >= phase.seconds:
                break
            self._sleep(phase.off)
        ended = self._clock()
        done = {
            "phase": phase.name,
            "began": began,
            "ended": ended,
            "busy_seconds": busy,
            "wall_seconds": ended - began,
        }
        per_time = {"flops": self._gpu.flops.get(phase.work, 0), "bytes": self._gpu.bytes.get(phase.work, 0)}
        return done | {name: each * times for name, each in per_time.items()}

    def _stretch(self, phase: Phase) -> tuple[float, int]:
        """Seconds on the device, and how often the work was done."""
        if phase.work == "idle":
            self._sleep(phase.on)
            return 0.0, 0
        if phase.work == "hold":
            self._gpu.hold(phase.on, self._sleep)
            return 0.0, 1
        times = max(1, round(phase.on / self._each[phase.work]))
        return self._gpu.timed(self._works[phase.work], times), times


def say(told: Mapping[str, Any]) -> None:
    """A line, at once."""
    print(json.dumps(told), flush=True)


def main() -> None:
    """All phases; `--scale` makes them shorter, and `--device cpu` with small sizes shows that this runs at all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--matrix", type=int, default=Sizes.matrix)
    parser.add_argument("--chunk", type=int, default=Sizes.chunk)
    parser.add_argument("--held", type=int, default=Sizes.held)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    import torch

    gpu = Gpu(torch, options.device, Sizes(options.matrix, options.chunk, options.held))
    say(gpu.describe())
    load = Load(gpu, time.time, time.sleep)
    for work in gpu.makers:
        attempt(work, load.warm_up, work)
    for phase in PHASES:
        time.sleep(GAP * options.scale)
        scaled = Phase(phase.name, phase.work, phase.seconds * options.scale, phase.on * options.scale, phase.off)
        say({"phase": phase.name, "began": time.time()})
        attempt(phase.name, lambda phase: say(load.run(phase)), scaled)
    time.sleep(GAP * options.scale)


def attempt(name: str, what: Callable[[T], None], argument: T) -> None:
    """One that fails, for memory that cannot be pinned, say, costs itself alone."""
    try:
        what(argument)
    except Exception as error:  # whatever torch has to say
        say({"failed": name, "error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
