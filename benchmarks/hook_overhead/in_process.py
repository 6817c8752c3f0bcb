"""What the hook costs a step of DDP, in one process: `python -m benchmarks.hook_overhead.in_process`.

Two processes of the same program differ by tens of microseconds a step, one process from block to block by few. So here
blocks of steps with and without the hook alternate in the same process: `instrument()` and `uninstrument()` in turn.
A block's figure is its median step, which other people's load lengthens least. The result is the median difference
over all pairs of blocks with its 95 % interval (bootstrap), beside an A/A control: pairs of blocks that are both
without the hook. What it cannot show: what happens seldom (the looks once a second, garbage collections), processes,
memory, start and exit; `benchmarks.hook_overhead` does, by the mean of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from benchmarks.hook_overhead.contenders import Nobody
from benchmarks.hook_overhead.trainings import Ddp
from torch._C._distributed_c10d import HashStore

import rankscope

MICROSECONDS = 1e6
RESAMPLES = 2000
WARM_UP = 130  # steps: the record is published, start-up is over, and the search for root modules (step 100) too


class Training(Protocol):
    """A loop that can be run again and again."""

    def run(self, steps: int) -> float:
        """Seconds a step over `steps` steps."""


class Loop:
    """DDP with a loader and an optimizer."""

    def __init__(self) -> None:
        self._training = Ddp()

    def run(self, steps: int) -> float:
        """Seconds of the median step of `steps`."""
        loop, ends = Nobody().loop, [time.perf_counter()]
        for _ in range(steps):
            loop(self._training, 1)
            ends.append(time.perf_counter())
        return statistics.median(end - begin for begin, end in pairwise(ends))


def with_hook(training: Training, steps: int) -> float:
    """Seconds a step with every probe that is on by default."""
    rankscope.instrument()
    training.run(WARM_UP)
    seconds = training.run(steps)
    rankscope.uninstrument()
    return seconds


def without_hook(training: Training, steps: int) -> float:
    """Seconds a step of the plain loop."""
    training.run(WARM_UP)
    return training.run(steps)


def differences(training: Training, pairs: int, steps: int, treated: Callable[[Training, int], float]) -> list[float]:
    """Seconds a step that `treated` takes longer than the plain loop, one value a pair, in alternating order."""
    found = []
    for number in range(pairs):
        if number % 2:
            plain, seconds = without_hook(training, steps), treated(training, steps)
        else:
            seconds, plain = treated(training, steps), without_hook(training, steps)
        found.append(seconds - plain)
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the 95 % interval of the median by bootstrap (percentile method)."""
    resample = random.Random(0).choices  # noqa: S311 - a bootstrap, not a secret
    medians = sorted(statistics.median(resample(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def report(options: argparse.Namespace) -> dict[str, object]:
    """All figures, in microseconds a step."""
    training = Loop()
    training.run(200)
    step = statistics.median(without_hook(training, options.steps) for _ in range(5))
    hook = interval(differences(training, options.pairs, options.steps, with_hook))
    control = interval(differences(training, options.pairs, options.steps, without_hook))
    return {
        "step_us": round(step * MICROSECONDS, 1),
        "hook_us": [round(value * MICROSECONDS, 1) for value in hook],
        "control_us": [round(value * MICROSECONDS, 1) for value in control],
        "pairs": options.pairs,
        "steps_per_block": options.steps,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure and print a line of JSON; `--json FILE` also keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--steps", type=int, default=50, help="steps a block")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = run_dir
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        figures = report(options)
        dist.destroy_process_group()
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
