"""What the fuzzers share: a count, a seed, a first number, and a report that goes on where the last call ended."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fuzz = Callable[[int, int, int], Counter[str]]
"""By seed, first number and count: what became of the inputs. Raises FuzzError that names one."""


class FuzzError(AssertionError):
    """An input that got something through."""


def main(description: str | None, noun: str, fuzz: Fuzz) -> None:
    """The command of a fuzzer whose inputs are called `noun`, in the plural: fuzz, print a report, keep it if asked to.

    Raises what `fuzz` raises, and then keeps nothing.
    """
    options = _options(description, noun)
    before = _kept(options.json, options.seed, noun)
    first = before[noun] if options.first is None else options.first
    began = time.monotonic()
    outcome = fuzz(options.seed, first, options.count)
    seconds = time.monotonic() - began
    print(f"{options.count} {noun} from number {first}, seed {options.seed}, in {seconds:.1f} s: no failure")
    for name, count in outcome.most_common():
        print(f"  {name:20} {count:8}")
    if options.json:
        total = Counter(before["outcome"]) + outcome
        report = {"seed": options.seed, noun: first + options.count, "outcome": dict(sorted(total.items()))}
        report["seconds"] = round(before["seconds"] + seconds, 1)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _options(description: str | None, noun: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{noun}", dest="count", metavar="N", type=int, default=10_000)
    parser.add_argument("--first", type=int, help="number of the first one (default: where --json ended, else 0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _kept(path: Path | None, seed: int, noun: str) -> dict[str, Any]:
    """The report of the calls before with this seed."""
    if path and path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if report["seed"] == seed:
            return report
    return {noun: 0, "outcome": {}, "seconds": 0.0}
