"""What the hook costs a step, in one process: `python -m benchmarks.hook_overhead.in_process`.

Two processes of the same program differ by tens of microseconds a step, one process from block to block by few. So here
blocks of steps with and without the hook alternate in the same process: `instrument()` and `uninstrument()` in turn.
A block's figure is its median step, which other people's load lengthens least; where a step sleeps, without the sleep,
from which the system wakes it later by more than the hook costs. The result is the median difference over all pairs of
blocks with its 95 % interval (bootstrap), beside an A/A control: pairs of blocks that are both without the hook. What
it cannot show: what happens seldom (the looks once a second, garbage collections), processes, memory, start and exit;
`benchmarks.hook_overhead` does, by the mean of all steps.

Beside the time stands what no other load changes: how many instructions of the interpreter the hook runs in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from benchmarks.hook_overhead.child import join
from benchmarks.hook_overhead.contenders import Nobody, Rankscope
from benchmarks.hook_overhead.trainings import TRAININGS, Alone
from torch.compiler import is_dynamo_compiling

import rankscope

HOOK = str(Path(rankscope.__file__).parent)
MICROSECONDS = 1e6
RESAMPLES = 2000
WARM_UP = 130  # steps: the record is published, start-up is over, and the search for root modules (step 100) too
SHORTER = {"ddp_100_ms": (5, 5)}  # steps a block, and how many times fewer pairs, where a step takes that long
# Microseconds that the hook may cost: DDP with everything on, a thousandth of a long step; elsewhere also of each
# collective that the script calls.
BOUNDS, BOUND, COLLECTIVE_BOUND = {"ddp": 50.0, "ddp_100_ms": 100.0}, 50.0, 8.0

Interval = tuple[float, float, float]  # the median and the ends of its 95 % interval


class Training(Protocol):
    """A loop that can be run again and again."""

    def warm_up(self) -> None:
        """Train until a step costs what it will cost: for `WARM_UP` steps."""

    def run(self, steps: int) -> float:
        """Seconds a step over `steps` steps."""


class Loop:
    """One of the trainings of this benchmark."""

    def __init__(self, training: Alone) -> None:
        self._training = training

    def warm_up(self) -> None:
        """Train for `WARM_UP` steps that do not sleep."""
        sleep, self._training.sleep = self._training.sleep, 0.0
        Nobody().loop(self._training, WARM_UP)
        self._training.sleep = sleep

    def run(self, steps: int) -> float:
        """Seconds of the median step of `steps`, without its sleep."""
        loop, clock = Nobody().loop, [self._clock()]
        for _ in range(steps):
            loop(self._training, 1)
            clock.append(self._clock())
        return statistics.median(end - begin for begin, end in pairwise(clock))

    def _clock(self) -> float:
        return time.perf_counter() - self._training.slept


def with_hook(training: Training, steps: int) -> float:
    """Seconds a step with every probe that is on by default."""
    rankscope.instrument()
    training.warm_up()
    seconds = training.run(steps)
    rankscope.uninstrument()
    return seconds


def without_hook(training: Training, steps: int) -> float:
    """Seconds a step of the plain loop."""
    training.warm_up()
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


def interval(values: Sequence[float]) -> Interval:
    """Median and the 95 % interval of the median by bootstrap (percentile method)."""
    resample = random.Random(0).choices  # noqa: S311 - a bootstrap, not a secret
    medians = sorted(statistics.median(resample(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def counts(training: Training, steps: int) -> tuple[float, int]:
    """Collectives a step, as the hook counts them; and the interpreter's instructions a step in its functions."""
    rankscope.instrument()
    training.warm_up()
    collectives = Rankscope().collectives()
    training.run(steps)
    collectives = Rankscope().collectives() - collectives
    instructions = instructions_of(lambda: training.run(1))
    rankscope.uninstrument()
    return collectives / steps, instructions


def instructions_of(run: Callable[[], object]) -> int:
    """The interpreter's instructions that the hook's functions execute within `run`, without those of C code."""
    found = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal found
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return trace

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        is_ours = frame.f_code.co_filename.startswith(HOOK) or frame.f_code is is_dynamo_compiling.__code__
        return trace(frame, event, argument) if is_ours else None

    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def compare(name: str, pairs: int) -> dict[str, Any]:
    """All figures of one training; seconds as microseconds a step."""
    make = TRAININGS[name]
    steps, fewer = SHORTER.get(name, (50, 1))
    pairs = max(1, pairs // fewer)
    if make.ranks:
        join(make.ranks)
    training = Loop(make())
    training.warm_up()
    step = statistics.median(without_hook(training, steps) for _ in range(5))
    hook, control = (
        [round(value * MICROSECONDS, 1) for value in interval(differences(training, pairs, steps, treated))]
        for treated in (with_hook, without_hook)
    )
    collectives, instructions = counts(training, steps)
    if make.ranks:
        dist.destroy_process_group()
    figures = {"step_us": round(step * MICROSECONDS, 1), "hook_us": hook, "control_us": control}
    figures["bound_us"] = BOUNDS.get(name, BOUND + COLLECTIVE_BOUND * collectives)
    figures |= {"collectives": collectives, "instructions": instructions}
    return {"training": name, **figures, "pairs": pairs, "steps_per_block": steps}


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    head: tuple[str, ...] = ("training", "step (µs)", "hook (µs a step)", "bound", "control (µs a step)")
    head += ("instructions a step", "collectives a step", "pairs")
    rows = [
        (
            *(line["training"], f"{line['step_us']:.0f}"),
            *(_span(line["hook_us"]), f"{line['bound_us']:.0f}", _span(line["control_us"])),
            *(str(line["instructions"]), f"{line['collectives']:.0f}"),
            f"{line['pairs']} of {line['steps_per_block']} steps",
        )
        for line in found
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _span(values: Sequence[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*values)


def page(figures: dict[str, Any]) -> str:
    """The report."""
    return f"""# hook_overhead.in_process

{__doc__}
On {figures["cores"]} cores (load {figures["load"]} at the end), Python {figures["python"]}, torch {figures["torch"]}.
Made by `make benchmark`. `fsdp2` is one of two ranks, whose other exchanges nothing.

{table(figures["found"])}
"""


def main() -> None:
    """Measure and print; `--json FILE` also keeps the figures, and the table beside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=600, help="of blocks, and as many of the control (%(default)s)")
    parser.add_argument("--training", nargs="+", choices=TRAININGS, default=list(TRAININGS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = run_dir
        for name in options.training:
            found.append(compare(name, options.pairs))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    figures = {"torch": str(torch.__version__), **machine, "found": found}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        options.json.with_suffix(".md").write_text(page(figures))


if __name__ == "__main__":
    main()
