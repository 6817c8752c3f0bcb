"""Measure the cost of each probe in a step, less exactly.

    python -m benchmarks.hook_overhead.by_probe

Before each step a random choice selects the probes that work in it: none, all, or one alone; the guards of the others
are switched off. Adjacent steps see the same machine, so that a minute shows what blocks of steps
(`benchmarks.hook_overhead.in_process`) need ten minutes for. The figures exclude the call of a probe's wrapper, which
stays installed, and probes that are chosen rarely find colder caches.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from benchmarks.hook_overhead.child import join
from benchmarks.hook_overhead.in_process import FEWEST_PAIRS, MICROSECONDS, Block, Loop, full_speed, run_directory
from benchmarks.hook_overhead.trainings import TRAININGS
from testing import report
from testing.statistics import bootstrap

import rankscope
from rankscope import probes
from rankscope.attach import Attachment
from rankscope.guard import Guard

NONE, ALL = "none", "all"
RESAMPLES = 200  # of thousands of steps each
EVERY_STEP = ["data_wait", "ddp", "forward", "backward", "collectives", "optimizer"]


@contextmanager
def collected_guards() -> Iterator[dict[str, Guard]]:
    """Yield the guard of each probe that is installed in the block."""
    guards: dict[str, Guard] = {}
    make = Attachment._guard  # noqa: SLF001 - the hook has no way to switch probes off temporarily, and needs none

    def kept(attachment: Attachment, name: str) -> Guard:
        guards[name] = make(attachment, name)
        return guards[name]

    with mock.patch.object(Attachment, "_guard", kept):
        yield guards


def run(training: str, steps: int, alone: Sequence[str]) -> dict[str, Block]:
    """Run `steps` steps and sort them by the probes that worked in them."""
    make = TRAININGS[training]
    if make.ranks:
        join(make.ranks)
    loop = Loop(make(), steps)
    with collected_guards() as guards:
        rankscope.instrument()
        loop.warm_up()
        draw = random.Random(0)  # noqa: S311 - an order, not a secret
        blocks: dict[str, Block] = {choice: [] for choice in (NONE, ALL, *alone)}
        for _ in range(steps):
            choice = draw.choice(list(blocks))
            for name, guard in guards.items():
                guard.disabled = choice not in (ALL, name)
            blocks[choice] += loop.run(1)
    rankscope.uninstrument()
    if make.ranks:
        dist.destroy_process_group()
    return blocks


def seconds(block: Block, limit: float) -> list[float]:
    """Return the steps next to which the reference loop took at most `limit` seconds."""
    return [step.seconds for step in block if step.reference <= limit]


def cost(block: Sequence[float], plain: Sequence[float]) -> str:
    """Return the difference of the medians in microseconds with its interval, and the number of steps."""
    if min(len(block), len(plain)) < FEWEST_PAIRS:
        return "too few"
    found = bootstrap(lambda draw: statistics.median(draw(block)) - statistics.median(draw(plain)), RESAMPLES)
    return f"{report.text(found.scaled(MICROSECONDS))} ({len(block)} steps)"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--training", choices=TRAININGS, default="ddp", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="(%(default)s)")
    help_alone = f"probes out of {', '.join(probes.all_probes())} (default: {', '.join(EVERY_STEP)})"
    parser.add_argument(
        "--alone", nargs="*", choices=probes.all_probes(), default=EVERY_STEP, metavar="PROBE", help=help_alone
    )
    options = parser.parse_args()
    with run_directory():
        blocks = run(options.training, options.steps, options.alone)
    limit = full_speed([step for block in blocks.values() for step in block])
    rows = [
        (name, *(cost(seconds(block, most), seconds(blocks[NONE], most)) for most in (limit, math.inf)))
        for name, block in blocks.items()
        if name != NONE
    ]
    table = report.table(("probes", "µs a step at the CPU's full speed", "µs a step, all steps"), rows)
    title = "Cost of each probe"
    report.Report("hook_overhead_by_probe", title, __doc__, "none", [table], rows, ["torch"]).publish(options.save)


if __name__ == "__main__":
    main()
