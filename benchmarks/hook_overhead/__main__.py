"""What the hook costs a training step, beside its peers: `python -m benchmarks.hook_overhead`.

One training process without anything and one with a contender take turns, block by block of steps, so that both see
the same machine; the pair is started anew several times, because two processes of the same program differ, too. The
result is the median difference a step with its 95 % interval (a bootstrap over the pairs of processes and, within
them, of blocks), beside an A/A control: both without anything. Wall time without what a step sleeps, as the system ends
a sleep later by more than is looked for, and the training thread's processor time, which other people's load disturbs
less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.hook_overhead.contenders import CONTENDERS
from benchmarks.hook_overhead.processes import Child, child, resident_mib
from benchmarks.hook_overhead.trainings import TRAININGS

MICROSECONDS = 1e6
RESAMPLES = 2000
WARM_UP = 300  # steps: start-up is over, the search for root modules rare, and the interpreter has specialised
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


def interval(pairs: Pairs) -> list[float]:
    """Median and 95 % interval of the median, in microseconds (percentile bootstrap of pairs, then of blocks)."""
    generator = random.Random(0)  # noqa: S311 - a bootstrap, not a secret

    def resample() -> float:
        chosen = generator.choices(pairs, k=len(pairs))
        return statistics.median(statistics.median(generator.choices(pair, k=len(pair))) for pair in chosen)

    medians = sorted(resample() for _ in range(RESAMPLES))
    middle = statistics.median(statistics.median(pair) for pair in pairs)
    values = (middle, medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])
    return [round(value * MICROSECONDS, 1) for value in values]


def table(found: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    head: tuple[str, ...] = (
        "training",
        "with",
        "step (ms)",
        "wall (µs a step)",
        "processor (µs a step)",
        "collectives a step",
    )
    head += ("processes", "threads", "MiB", "begin (s)", "start (s)", "exit (s)")
    rows = [
        (
            *(line["training"], line["contender"], f"{line['step_us'] / 1000:.2f}"),
            *("{:+.1f} [{:+.1f}, {:+.1f}]".format(*line[name]) for name in ("wall_us", "processor_us")),
            f"{line['collectives']:.0f}" if line["contender"] == "rankscope" else "",
            *(f"{line[name]:+.0f}" for name in ("processes", "threads")),
            f"{line['mib']:+.1f}",
            *(f"{line[name]:+.2f}" for name in ("begin_seconds", "start_seconds", "exit_seconds")),
        )
        for line in found
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def conditions(options: argparse.Namespace) -> dict[str, object]:
    """Where and on what this was measured."""
    packages = ("torch", "prometheus-client", "traceml-ai")
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    amounts = {"rounds": options.rounds, "blocks": options.blocks, "steps_per_block": options.steps}
    return {**machine, **amounts, "versions": {name: metadata.version(name) for name in packages}}


def page(figures: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return f"""# hook_overhead

{__doc__}
*begin*: import and instrument, within the process. *start*, *exit*: how much later the process was ready to train, and
was gone after its end, than the plain one; *processes*, *threads* (of Python, in the training process), *MiB*
(resident, of all its processes): how many more. *collectives a step*: as Rankscope counts them.

On {figures["cores"]} cores that others used too (load {figures["load"]} at the end), Python {figures["python"]},
{versions}: {figures["rounds"]} pairs of processes, {figures["blocks"]} pairs of blocks
of {figures["steps_per_block"]} steps each. Made by `make benchmark`.

{table(figures["found"])}
"""


def main() -> None:
    """Measure and print; `--json FILE` also keeps the figures, and the table beside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of processes of each line")
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks of each pair of processes")
    parser.add_argument("--steps", type=int, default=25, help="steps a block")
    parser.add_argument("--only", help="lines whose training/contender contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    compared = [pair for pair in COMPARED if not options.only or options.only in "/".join(pair)]
    found = []
    for training, contender in compared:
        found.append(compare(training, contender, options))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    figures = {**conditions(options), "found": found}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        options.json.with_suffix(".md").write_text(page(figures))


if __name__ == "__main__":
    main()
