"""The command line of the fuzzers: a count, a seed, a first number, and a report that the next call continues."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from testing import report

Fuzz = Callable[[int, int, int], Counter[str]]
"""A function of seed, first number and count that returns the outcomes. Raises FuzzError that names an input."""


class FuzzError(AssertionError):
    """An input that was handled incorrectly."""


def main(description: str | None, noun: str, fuzz: Fuzz, name: str, bound: str) -> None:
    """Fuzz inputs, whose plural is `noun`, and publish the report `name`.

    With `--save` it continues the report of earlier calls with this seed. Raises what `fuzz` raises, without writing.
    """
    options = _options(description, noun)
    before = _saved(options, name)
    first = before["inputs"] if options.first is None else options.first
    began = time.monotonic()
    outcome = Counter(before["outcome"]) + fuzz(options.seed, first, options.count)
    seconds = round(before["seconds"] + time.monotonic() - began, 1)
    inputs = first + options.count
    figures = {"seed": options.seed, "inputs": inputs, "outcome": dict(sorted(outcome.items())), "seconds": seconds}
    amount = f"{inputs:,} {noun}, seed {options.seed}, in {seconds} s: no failure."
    table = report.table(("outcome", noun), outcome.most_common())
    title = f"Fuzzing: {noun}"
    report.Report(name, title, description, bound, [amount, table], figures).publish(options.save)


def _options(description: str | None, noun: str) -> argparse.Namespace:
    parser = report.parser(description)
    parser.add_argument(f"--{noun}", dest="count", metavar="N", type=int, default=10_000)
    parser.add_argument("--first", type=int, help="number of the first one (default: where --save ended, else 0)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _saved(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the figures of earlier calls with this seed."""
    path = options.save and options.save.raw / f"{name}.json"
    if path and path.exists():
        figures: dict[str, Any] = json.loads(path.read_text())["figures"]
        if figures["seed"] == options.seed:
            return figures
    return {"inputs": 0, "outcome": {}, "seconds": 0.0}
