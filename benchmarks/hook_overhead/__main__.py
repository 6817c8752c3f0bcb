"""Measure the cost of the hook in a training step, compared with other libraries, in separate processes.

    python -m benchmarks.hook_overhead --save

A plain training process and one with a contender alternate, block by block of steps, so that both see the same machine.
Each pair starts several times, because two processes of the same program also differ. The result is the median
difference of a step with its 95% interval (a bootstrap over the pairs of processes and, within them, of blocks), next
to an A/A control: both plain. *wall* excludes a step's sleep, because the system ends a sleep late by more than the
difference; *CPU* is the training thread's CPU time, which other load changes less.

*begin*: seconds to import and instrument, in the process. *start*, *exit*: how much later than the plain process it was
ready to train, and had ended. *processes*, *threads* (Python's, in the training process) and *MiB* (resident, of all
its processes) are additional ones. *collectives a step* are counted by Rankscope.
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
WARM_UP = 300  # steps: start-up is over, searches for root modules are rare, and the interpreter has specialized
COMPARED = [("ddp", name) for name in CONTENDERS] + [
    (training, name) for training in TRAININGS if training != "ddp" for name in ("plain", "rankscope")
]
BLOCKS = {"ddp_100_ms": (40, 5, 6)}  # steps of warm-up and of a block, and blocks, instead of the options
Pairs = list[list[float]]  # additional seconds a step, by pair of processes and by block


def compare(training: str, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one contender in one training."""
    rounds = [one_pair(training, contender, options, number) for number in range(options.rounds)]
    typical = {name: statistics.median(found[name] for found in rounds) for name in rounds[0] if name != "blocks"}
    blocks = [found["blocks"] for found in rounds]
    figures: dict[str, Any] = {name: round(value, 4) for name, value in typical.items()}
    for index, name in enumerate(("wall_us", "cpu_us")):
        figures[name] = interval([[block[index] for block in pair] for pair in blocks])
    return {"training": training, "contender": contender, **figures}


def one_pair(training: str, contender: str, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Measure two new processes, the plain one first in every other pair."""
    warm_up, steps, count = BLOCKS.get(training, (WARM_UP, options.steps, options.blocks))
    with child(training, "plain") as plain, child(training, contender) as other:
        for process in (plain, other):
            process.run(warm_up)
        found = [block(plain, other, steps, (number + index) % 2 == 0) for index in range(count)]
        seen = outside(plain, other)
        exits = [plain.end(), other.end()]
    return {**seen, "exit_seconds": exits[1] - exits[0], "blocks": [difference for difference, _ in found]} | {
        "step_us": statistics.median(step for _, step in found) * MICROSECONDS
    }


def block(plain: Child, other: Child, steps: int, plain_first: bool) -> tuple[tuple[float, float], float]:
    """Return the additional seconds (wall, CPU) of a step of `other`, and the plain one's wall time."""
    order = (plain, other) if plain_first else (other, plain)
    seconds = {process: process.run(steps) for process in order}
    (wall, cpu), (plain_wall, plain_cpu) = seconds[other], seconds[plain]
    return (wall - plain_wall, cpu - plain_cpu), plain_wall


def outside(plain: Child, other: Child) -> dict[str, float]:
    """Return the additional processes, threads, memory and seconds of a contender."""
    pids = [process.processes() for process in (plain, other)]
    return {
        "processes": len(pids[1]) - len(pids[0]),
        "threads": other.last["threads"] - plain.last["threads"],
        "mib": resident_mib(pids[1]) - resident_mib(pids[0]),
        "collectives": other.last["collectives"],
        "begin_seconds": other.start[0],
        "begin_cpu_seconds": other.start[1],
        "start_seconds": other.ready - plain.ready,
    }


def interval(pairs: Pairs) -> Interval:
    """Return the median in microseconds, with an interval that resamples pairs and then their blocks."""
    return bootstrap(
        lambda resample: statistics.median(statistics.median(resample(pair)) for pair in resample(pairs))
    ).scaled(MICROSECONDS)


def table(found: list[dict[str, Any]]) -> str:
    head = ["training", "with", "step (ms)", "wall (µs a step)", "CPU (µs a step)", "collectives a step"]
    head += ["processes", "threads", "MiB", "begin (s)", "start (s)", "exit (s)"]
    return report.table(head, map(_row, found))


def _row(line: dict[str, Any]) -> list[str]:
    differences = [report.text(line[name]) for name in ("wall_us", "cpu_us")]
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
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of processes a line")
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks a pair of processes")
    parser.add_argument("--steps", type=int, default=25, help="steps a block")
    parser.add_argument("--only", help="only lines whose training/contender contains this")
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
