"""What the hook costs a training step: `python benchmarks/hook_overhead.py`.

One process, one DDP model (gloo, world size 1), so that the step is short and quiet and nothing hides the cost.
Blocks of steps with and without the hook alternate; within a pair both see the same machine. The result is the
median difference per step with its 95 % interval (bootstrap), beside an A/A control: pairs of blocks that are
both without the hook, which says how much of the figure is noise.
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
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankscope

MICROSECONDS = 1e6
RESAMPLES = 2000


class Training:
    """A loop with everything that the probes watch: a loader, DDP with buffers, an optimizer, a plain collective."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))

    def run(self, steps: int) -> float:
        """Seconds a step over `steps` steps."""
        batches = iter(DataLoader(self.data, batch_size=16))
        inputs, targets = next(batches)
        began = time.perf_counter()
        for _ in range(steps):
            inputs, targets = next(batches)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
        return (time.perf_counter() - began) / steps


def with_hook(training: Training, steps: int) -> float:
    """Seconds a step with every probe that is on by default."""
    rankscope.instrument()
    training.run(20)  # the record is published and start-up is over
    seconds = training.run(steps)
    rankscope.uninstrument()
    return seconds


def without_hook(training: Training, steps: int) -> float:
    """Seconds a step of the plain loop."""
    training.run(20)
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
    training = Training()
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
    }


def main() -> None:
    """Measure and print; `--json FILE` also keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=50, help="steps a block")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = run_dir
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        figures = report(options)
        dist.destroy_process_group()
    print("                      median     95 % interval   (µs a step)")
    for name, key in (("with the hook", "hook_us"), ("A/A control", "control_us")):
        median, low, high = figures[key]
        print(f"{name:20} {median:+8.1f}   [{low:+.1f}, {high:+.1f}]")
    print(f"{options.pairs} pairs of {options.steps} steps of {figures['step_us']} µs each")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
