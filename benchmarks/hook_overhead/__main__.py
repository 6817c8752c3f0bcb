"""Measure what the hook costs a training step, next to other libraries, in processes of their own.

    python -m benchmarks.hook_overhead --save

A plain training process and one with a contender take turns, block by block of steps, so that both see the same
machine. Each pair starts several times, because two processes of the same program differ, too. The result is the median
difference of a step with its 95% interval (a bootstrap over the pairs of processes and, within them, of blocks), next
to an A/A control: both plain. *wall* leaves out what a step sleeps, because the system ends a sleep later by more than
the difference; *CPU* is the training thread's CPU time, which other load disturbs less.

*begin*: import and instrument, within the process. *start*, *exit*: how much later than the plain process it was ready
to train, and gone after its end. *processes*, *threads* (of Python, in the training process), *MiB* (resident, of all
its processes): how many more. *collectives a step*: as Rankscope counts them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.hook_overhead.contenders import CONTENDERS
from benchmarks.hook_overhead.processes import Child, child, resident_mib
from benchmarks.hook_overhead.trainings import TRAININGS
from testing import report
from testing.statistics import Interval, bootstrap

MICROSECONDS = 1e6
WARM_UP = 300  # steps: start-up is over, the search for root modules rare, and the interpreter has specialized
COMPARED = [("ddp", name) for name in CONTENDERS] + [
    (training, name) for training in TRAININGS if training != "ddp" for name in ("nobody", "rankscope")
]
BLOCKS = {"ddp_100_ms": (40, 5, 6)}  # steps of warm-up and of a block, and blocks, where they are not the options'
Pairs = list[list[float]]  # by pair of processes, by block: seconds a step more than without


def compare(training: str, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one contender in one training."""
    rounds = [one_pair(training, contender, options, number) for number in range(options.rounds)]
    typical = {name: statistics.median(found[name] for found in rounds) for name in rounds[0] if name != "blocks"}
    blocks = [found["blocks"] for found in rounds]
    figures: dict[str, Any] = {name: round(value, 4) for name, value in typical.items()}
    for index, name in enumerate(("wall_us", "processor_us")):
        figures[name] = interval([[block[index] for block in pair] for pair in blocks])
    return {"training": training, "contender": contender, **figures}


def one_pair(training: str, contender: str, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Two fresh processes, the plain one first in every other pair."""
    warm_up, steps, count = BLOCKS.get(training, (WARM_UP, options.steps, options.blocks))
    with child(training, "nobody") as plain, child(training, contender) as watched:
        for process in (plain, watched):
            process.run(warm_up)
        found = [block(plain, watched, steps, (number + index) % 2 == 0) for index in range(count)]
        seen = outside(plain, watched)
        exits = [plain.end(), watched.end()]
    return {**seen, "exit_seconds": exits[1] - exits[0], "blocks": [difference for difference, _ in found]} | {
        "step_us": statistics.median(step for _, step in found) * MICROSECONDS
    }


def block(plain: Child, watched: Child, steps: int, plain_first: bool) -> tuple[tuple[float, float], float]:
    """How much longer (wall, processor) a step of `watched` takes, and the plain one's wall time."""
    order = (plain, watched) if plain_first else (watched, plain)
    seconds = {process: process.run(steps) for process in order}
    (wall, processor), (plain_wall, plain_processor) = seconds[watched], seconds[plain]
    return (wall - plain_wall, processor - plain_processor), plain_wall


def outside(plain: Child, watched: Child) -> dict[str, float]:
    """What a contender brings along."""
    pids = [process.processes() for process in (plain, watched)]
    return {
        "processes": len(pids[1]) - len(pids[0]),
        "threads": watched.last["threads"] - plain.last["threads"],
        "mib": resident_mib(pids[1]) - resident_mib(pids[0]),
        "collectives": watched.last["collectives"],
        "begin_seconds": watched.start[0],
        "begin_processor_seconds": watched.start[1],
        "start_seconds": watched.ready - plain.ready,
    }


def interval(pairs: Pairs) -> Interval:
    """Return the median in microseconds, with an interval that resamples pairs and then their blocks."""
    return bootstrap(
        lambda resample: statistics.median(statistics.median(resample(pair)) for pair in resample(pairs))
    ).scaled(MICROSECONDS)


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    head = ["training", "with", "step (ms)", "wall (µs a step)", "CPU (µs a step)", "collectives a step"]
    head += ["processes", "threads", "MiB", "begin (s)", "start (s)", "exit (s)"]
    return report.table(head, map(_row, found))


def _row(line: dict[str, Any]) -> list[str]:
    differences = [report.text(line[name]) for name in ("wall_us", "processor_us")]
    collectives = f"{line['collectives']:.0f}" if line["contender"] == "rankscope" else ""
    counts = [f"{line[name]:+.0f}" for name in ("processes", "threads")]
    seconds = [f"{line[name]:+.2f}" for name in ("begin_seconds", "start_seconds", "exit_seconds")]
    step = f"{line['step_us'] / 1000:.2f}"
    return [
        line["training"],
        line["contender"],
        step,
        *differences,
        collectives,
        *counts,
        f"{line['mib']:+.1f}",
        *seconds,
    ]


def main() -> None:
    """Measure and publish."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of processes of each line")
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks of each pair of processes")
    parser.add_argument("--steps", type=int, default=25, help="steps a block")
    parser.add_argument("--only", help="lines whose training/contender contains this")
    options = parser.parse_args()
    found = []
    for training, contender in COMPARED:
        if not options.only or options.only in f"{training}/{contender}":
            found.append(compare(training, contender, options))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    amount = f"{options.rounds} pairs of processes, {options.blocks} pairs of blocks of {options.steps} steps each."
    title = "Cost of the hook next to other libraries"
    packages = ["torch", "prometheus-client", "traceml-ai"]
    bound = "none; that of `hook_overhead_in_process` is measured more exactly"
    report.Report("hook_overhead", title, __doc__, bound, [amount, table(found)], found, packages).publish(options.save)


if __name__ == "__main__":
    main()
