"""What each probe costs a step: `python -m benchmarks.hook_overhead.by_probe`.

Before each step it is drawn at random which probes work in it: none, all, or one alone; the fuses of the others are
blown meanwhile. Neighbouring steps see the same machine, so that a minute tells what blocks of steps
(`benchmarks.hook_overhead.in_process`) need ten for. But it says less: with a blown fuse a probe's wrapper is still
there, so what it costs just to be called is not in the figures; and what is drawn seldom finds the caches colder.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.hook_overhead.child import join
from benchmarks.hook_overhead.in_process import FEWEST_PAIRS, MICROSECONDS, Block, Loop, full_speed
from benchmarks.hook_overhead.trainings import TRAININGS

import rankscope
from rankscope import probes
from rankscope.attach import Attachment
from rankscope.guard import Guard

NONE, ALL = "none", "all"
RESAMPLES = 200  # of thousands of steps each
EVERY_STEP = ["data_wait", "ddp", "forward", "backward", "collectives", "optimizer"]


@contextmanager
def watched_fuses() -> Iterator[dict[str, Guard]]:
    """The fuse of each probe that is installed within."""
    fuses: dict[str, Guard] = {}
    make = Attachment._guard  # noqa: SLF001 - the hook has no way to switch probes off in between, and needs none

    def kept(attachment: Attachment, name: str) -> Guard:
        fuses[name] = make(attachment, name)
        return fuses[name]

    with mock.patch.object(Attachment, "_guard", kept):
        yield fuses


def run(training: str, steps: int, alone: Sequence[str]) -> dict[str, Block]:
    """`steps` steps, sorted by which probes worked in them."""
    make = TRAININGS[training]
    if make.ranks:
        join(make.ranks)
    loop = Loop(make(), steps)
    with watched_fuses() as fuses:
        rankscope.instrument()
        loop.warm_up()
        draw = random.Random(0)  # noqa: S311 - an order, not a secret
        blocks: dict[str, Block] = {choice: [] for choice in (NONE, ALL, *alone)}
        for _ in range(steps):
            choice = draw.choice(list(blocks))
            for name, fuse in fuses.items():
                fuse.blown = choice not in (ALL, name)
            blocks[choice] += loop.run(1)
    rankscope.uninstrument()
    if make.ranks:
        dist.destroy_process_group()
    return blocks


def seconds(block: Block, limit: float) -> list[float]:
    """The steps beside which the reference loop took `limit` seconds at most."""
    return [step.seconds for step in block if step.reference <= limit]


def cost(block: Sequence[float], plain: Sequence[float]) -> str:
    """The difference of the medians, in microseconds, with its 95 % interval (bootstrap) and the number of steps."""
    if min(len(block), len(plain)) < FEWEST_PAIRS:
        return "too few"
    resample = random.Random(0).choices  # noqa: S311 - a bootstrap, not a secret
    found = sorted(
        statistics.median(resample(block, k=len(block))) - statistics.median(resample(plain, k=len(plain)))
        for _ in range(RESAMPLES)
    )
    ends = (statistics.median(block) - statistics.median(plain), found[RESAMPLES // 40], found[-RESAMPLES // 40])
    return "{:+.1f} [{:+.1f}, {:+.1f}] ({} steps)".format(*(end * MICROSECONDS for end in ends), len(block))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", choices=TRAININGS, default="ddp", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="(%(default)s)")
    help_alone = f"of {', '.join(probes.all_probes())} (default: {', '.join(EVERY_STEP)})"
    parser.add_argument(
        "--alone", nargs="*", choices=probes.all_probes(), default=EVERY_STEP, metavar="PROBE", help=help_alone
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = run_dir
        blocks = run(options.training, options.steps, options.alone)
    limit = full_speed([step for block in blocks.values() for step in block])
    print("| probes | µs a step at the CPU's full speed | µs a step, all steps |\n| --- | --- | --- |")
    for name in blocks:
        if name != NONE:
            costs = [cost(seconds(blocks[name], most), seconds(blocks[NONE], most)) for most in (limit, math.inf)]
            print(f"| {name} | {' | '.join(costs)} |")


if __name__ == "__main__":
    main()
