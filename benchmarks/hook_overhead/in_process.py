"""Measure the cost of the hook in a step, in one process.

    python -m benchmarks.hook_overhead.in_process --pairs 250 --save

Two processes of the same program differ by tens of microseconds a step, the blocks of one process by few. So blocks of
steps with and without the hook alternate in the same process: `instrument()` and `uninstrument()` in turn.

Other load on the physical core makes every step up to twice as long, for tens of milliseconds or for minutes. So a
constant reference loop runs between the steps; a step counts if both loops around it ran at the CPU's full speed. A
block's figure is the median of these steps, without their sleep, because the system wakes them later by more than the
hook costs. The result is the median difference over all pairs of blocks with its 95% interval (bootstrap), next to an
A/A control: pairs of blocks that are both without the hook; and the same of all steps. This does not measure rare work
(once a second, garbage collections), processes, memory, start and exit; `benchmarks.hook_overhead` does.

Page faults a step are the process's minor faults, the mean of all blocks without the hook and with it. They depend on
the layout of the heap, and differ from one process to the next.

The instructions that the interpreter runs in the hook in a step do not depend on other load. `fsdp2` is one of two
ranks; the other one exchanges nothing.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from benchmarks.hook_overhead.child import join
from benchmarks.hook_overhead.contenders import Plain, Rankscope
from benchmarks.hook_overhead.trainings import TRAININGS, Alone
from testing import report
from testing.statistics import Interval, median_interval
from torch.compiler import is_dynamo_compiling

import rankscope

HOOK = str(Path(rankscope.__file__).parent)
MICROSECONDS = 1e6
# Steps before a block is measured: the record is published, and start-up is over. And steps of the block, which ends
# before step 100, when the hook looks for root modules again.
WARM_UP, STEPS = 25, 65
SHORTER = {"20_ms": 30, "100_ms": 20}  # steps of a block, if a step takes that long
REFERENCE_ROUNDS = 750  # of the loop between two steps, which runs twice: 50 µs
# Full speed: at most this factor of the fastest loops but for a few outliers. Sharing the core costs 1.4.
FULL_SPEED, FASTEST = 1.15, 0.005
FEWEST, FEWEST_PAIRS = 3, 20  # steps at full speed for a block's figure; pairs with figures for a result
# Microseconds that the hook may cost: DDP with all probes, a thousandth of a long step; elsewhere also for each
# collective that the script calls.
BOUNDS, BOUND, COLLECTIVE_BOUND = {"ddp": 50.0, "ddp_100_ms": 100.0}, 50.0, 8.0

Found = TypeVar("Found")


class Step(NamedTuple):
    """One step of a block, in seconds."""

    seconds: float
    reference: float  # the slower one of the reference loops before and after it
    faults: int  # minor page faults of the process


Block = list[Step]


class Loop:
    """A training that can be run repeatedly."""

    def __init__(self, training: Alone, steps: int) -> None:
        self._training = training
        self._steps = steps

    def without_hook(self) -> Block:
        """Run a block of the plain loop."""
        self.warm_up()
        return self.run(self._steps)

    def with_hook(self) -> Block:
        """Run a block with every default probe."""
        rankscope.instrument()
        self.warm_up()
        found = self.run(self._steps)
        rankscope.uninstrument()
        return found

    def counts(self) -> tuple[float, int]:
        """Return a step's collectives, as the hook counts them, and the interpreter's instructions in the hook."""
        rankscope.instrument()
        self.warm_up()
        collectives = Rankscope().collectives()
        self.run(self._steps)
        collectives = Rankscope().collectives() - collectives
        instructions = min(instructions_of(lambda: self.run(1)) for _ in range(2))  # one may include rarer work
        rankscope.uninstrument()
        return collectives / self._steps, instructions

    def run(self, steps: int) -> Block:
        """Train, with a reference loop around each step."""
        found, before = [], reference()
        for _ in range(steps):
            faults, began = page_faults(), self._clock()
            Plain().loop(self._training, 1)
            seconds, faults = self._clock() - began, page_faults() - faults
            after = reference()
            found.append(Step(seconds, max(before, after), faults))
            before = after
        return found

    def warm_up(self) -> None:
        """Train for `WARM_UP` steps that do not sleep."""
        sleep, self._training.sleep = self._training.sleep, 0.0
        Plain().loop(self._training, WARM_UP)
        self._training.sleep = sleep

    def _clock(self) -> float:
        return time.perf_counter() - self._training.slept


def page_faults() -> int:
    """Return the minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def reference() -> float:
    """Return the seconds of a constant loop: the CPU's current speed. The first run wakes it up after a sleep."""
    return min(_loop(), _loop())


def _loop() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(REFERENCE_ROUNDS):
        total += number
    return time.perf_counter() - began


def alternating(pairs: int, plain: Callable[[], Found], other: Callable[[], Found]) -> list[tuple[Found, Found]]:
    """Run both functions in turn, with alternating order. Return the pairs of results."""
    found = []
    for number in range(pairs):
        if number % 2:
            first = plain()
            found.append((first, other()))
        else:
            second = other()
            found.append((plain(), second))
    return found


def full_speed(steps: Block) -> float:
    """Return the most seconds that the reference loop takes at the CPU's full speed."""
    references = sorted(step.reference for step in steps)
    return FULL_SPEED * references[int(FASTEST * len(references))]


def figure(block: Block, limit: float) -> float | None:
    """Return the median of the steps next to which the reference loop took at most `limit` seconds; None of too few."""
    seconds = [step.seconds for step in block if step.reference <= limit]
    return statistics.median(seconds) if len(seconds) >= FEWEST else None


def differences(pairs: Sequence[tuple[Block, Block]], limit: float) -> list[float]:
    """Return the additional seconds a step of the second block, for each pair in which both have a figure."""
    figures = [(figure(plain, limit), figure(other, limit)) for plain, other in pairs]
    return [other - plain for plain, other in figures if plain is not None and other is not None]


def instructions_of(run: Callable[[], object]) -> int:
    """Return the interpreter's instructions in the hook's functions during `run`, without those of C code."""
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
    """Return all figures of one training, in microseconds a step."""
    make = TRAININGS[name]
    steps = next((steps for length, steps in SHORTER.items() if name.endswith(length)), STEPS)
    if make.ranks:
        join(make.ranks)
    training = Loop(make(), steps)
    training.without_hook()
    hooked = alternating(pairs, training.without_hook, training.with_hook)
    control = alternating(pairs, training.without_hook, training.without_hook)
    collectives, instructions = training.counts()
    if make.ranks:
        dist.destroy_process_group()
    plain = [step for pair in control for block in pair for step in block]
    limit = full_speed(plain)
    figures: dict[str, Any] = {
        "step_us": microseconds(statistics.median(step.seconds for step in plain if step.reference <= limit)),
        "hook_us": span(differences(hooked, limit)),
        "control_us": span(differences(control, limit)),
        "bound_us": BOUNDS.get(name, BOUND + COLLECTIVE_BOUND * collectives),
        "full_speed": round(sum(step.reference <= limit for step in plain) / len(plain), 2),
        "all_steps_us": microseconds(statistics.median(step.seconds for step in plain)),
        "all_hook_us": span(differences(hooked, math.inf)),
        "all_control_us": span(differences(control, math.inf)),
    }
    figures["faults"] = [mean_faults(blocks) for blocks in zip(*hooked, strict=True)]
    figures["control_faults"] = [mean_faults(blocks) for blocks in zip(*control, strict=True)]
    figures |= {"collectives": collectives, "instructions": instructions}
    return {"training": name, **figures, "pairs": pairs, "steps_per_block": steps}


def mean_faults(blocks: Sequence[Block]) -> float:
    """Return the page faults a step of all these blocks, rounded to a tenth."""
    return round(statistics.fmean(step.faults for block in blocks for step in block), 1)


def span(values: Sequence[float]) -> Interval | None:
    """Return the median and its interval in microseconds; None of too few seconds."""
    return median_interval(values).scaled(MICROSECONDS) if len(values) >= FEWEST_PAIRS else None


def microseconds(seconds: float) -> float:
    """Return microseconds, rounded to a tenth."""
    return round(seconds * MICROSECONDS, 1)


def table(found: Sequence[dict[str, Any]]) -> str:
    head = ["training", "step (µs)", "hook (µs a step)", "bound", "control (µs a step)", "steps at full speed"]
    head += ["all steps (µs)", "hook, all", "control, all", "faults a step: without, with"]
    head += ["the same, control", "instructions a step", "collectives a step", "pairs"]
    return report.table(head, map(_row, found))


def _row(line: dict[str, Any]) -> list[str]:
    hook, control, all_hook, all_control = (
        report.text(line[name]) for name in ("hook_us", "control_us", "all_hook_us", "all_control_us")
    )
    at_full_speed = [f"{line['step_us']:.0f}", hook, f"{line['bound_us']:.0f}", control, f"{line['full_speed']:.0%}"]
    of_all = [f"{line['all_steps_us']:.0f}", all_hook, all_control]
    counts = [
        *("{}, {}".format(*line[name]) for name in ("faults", "control_faults")),
        str(line["instructions"]),
        f"{line['collectives']:.0f}",
        f"{line['pairs']} of {line['steps_per_block']} steps",
    ]
    return [line["training"], *at_full_speed, *of_all, *counts]


@contextmanager
def run_directory() -> Iterator[None]:
    """Use one thread, and a run directory of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = run_dir
        yield


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=600, help="pairs of blocks, also for the control (%(default)s)")
    parser.add_argument("--training", nargs="+", choices=TRAININGS, default=list(TRAININGS), metavar="NAME")
    options = parser.parse_args()
    found = []
    with run_directory():
        for name in options.training:
            found.append(compare(name, options.pairs))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    bound = "by training, in the table: 50 µs a step and 8 µs for each collective of the script; a long step 0.1%"
    title = "Cost of the hook in one process"
    report.Report("hook_overhead_in_process", title, __doc__, bound, [table(found)], found, ["torch"]).publish(
        options.save
    )


if __name__ == "__main__":
    main()
