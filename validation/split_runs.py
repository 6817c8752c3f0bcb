"""Compare the findings about a run on one node with those about the same run on 2, 4, 8 and 16 nodes.

    python -m validation.split_runs --save
    python -m validation.split_runs --scripts SCRIPT ...    trials of these scripts instead, on two nodes

Simulated ranks (`testing/split_training.py`), eight of them, or 16 on 16 nodes, in steps of 0.2 s. On one node, their
readings go to the judge of an exporter. On several, they go through the JSON of `/api/v1/facts`, each third second, to
an analyzer. Seconds are from the onset to the second in whose readings the finding is; a pull comes later. A script
plays its scenes with `Trial` and `Training` of `testing/readings.py`; seconds are then from its start.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from math import exp
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from testing import readings, report
from testing.readings import Work, spend
from testing.split_training import SCENES, Key, Scene, SplitTrial, SteppingTraining, opened

from rankscope_exporter.diagnosis.facts import DEVICE, HOST
from rankscope_exporter.diagnosis.findings import Finding

SIZES = ((8, 2), (8, 4), (8, 8), (16, 16))
"""The numbers of ranks and nodes."""


def in_turn(step: int, rank: int, work: Work) -> None:
    """Make ranks 1, 3 and 5 late, each in every third step."""
    if rank == (1, 3, 5)[step % 3]:
        work["backward"] += 0.12


def uneven(step: int, rank: int, work: Work) -> None:
    """Give each rank another part of the work in each step, as sequences of unequal length do."""
    work["other"] = work.get("other", 0.0) + 0.1 * exp(Random(16 * step + rank).gauss(0.0, 0.5))


LONG = {
    "five ranks of eight": Scene(120, (spend("backward", 0.1, 3, 4, 5, 6, 7),)),
    "one rank for 20 s of each minute": Scene(600, (spend("other", 20.0, 0, every=190),)),
    "a rank that is late in each fiftieth step": Scene(600, (spend("other", 5.0, 2, every=50),)),
    "three ranks in turn": Scene(700, (in_turn,)),
    "two culprits": Scene(300, (spend("backward", 0.06, 2), spend("data_wait", 0.12, 5, 6))),
    "a pause of all ranks in each thousandth step": Scene(600, (spend("other", 60.0, every=1000),)),
    "uneven work": Scene(300, (uneven,), healthy=(uneven,)),
}
"""Scenes that take too long for a test."""


def compare_trials(script: Path) -> list[dict[str, Any]]:
    """Run a script, and return what both judges find in each of its trials."""
    trials: list[SplitTrial] = []

    class Recorded(SplitTrial):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            trials.append(self)

    sys.path.insert(0, str(script.parent))
    with mock.patch.multiple(readings, Trial=Recorded, Training=SteppingTraining), redirect_stdout(None):
        runpy.run_path(str(script), run_name="__main__")
    return [
        _compared(trial, f"{script.stem} {number}", trial.training._clock, 2, 0.0)
        for number, trial in enumerate(trials, 1)
    ]


def compare(name: str, clock: str, ranks: int, nodes: int) -> dict[str, Any]:
    """Return what both judges find in a scene."""
    trial = SplitTrial(SteppingTraining(ranks, clock=clock), nodes=nodes)
    onset = trial.play((SCENES | LONG)[name])
    return _compared(trial, name, clock, nodes, onset)


def _compared(trial: SplitTrial, name: str, clock: str, nodes: int, onset: float) -> dict[str, Any]:
    alone, split = opened(trial.alone), opened(trial.split)
    return {
        "scene": name,
        "clock": clock,
        "nodes": nodes,
        "one node": _in_words(alone, onset),
        "several": _in_words(split, onset),
        "is_same": alone.keys() == split.keys(),
    }


def _in_words(found: Mapping[Key, Finding], onset: float) -> str:
    return (
        "; ".join(
            f"{kind} ({cause}){f' of {finding.candidate.place.rank_label}' if ranks else ''}: "
            f"{finding.candidate.ratio:.0%}, {finding.opened - onset:.0f} s"
            for (kind, cause, ranks), finding in found.items()
        )
        or "nothing"
    )


def main() -> int:
    """Compare all scenes and publish. Return 1 if any differs."""
    parser = report.parser(__doc__, prog="python -m validation.split_runs")
    parser.add_argument("--scripts", type=Path, nargs="+")
    options = parser.parse_args()
    tasks = [(name, clock, *size) for name in SCENES | LONG for clock in (HOST, DEVICE) for size in SIZES]
    with ProcessPoolExecutor(max_tasks_per_child=1) as pool:  # a script may change what others import
        if options.scripts:
            results = [one for found in pool.map(compare_trials, options.scripts) for one in found]
        else:
            results = [*pool.map(compare, *zip(*tasks, strict=True))]
    columns = ("scene", "clock", "nodes", "one node", "several")
    rows = [(*(one[column] for column in columns), report.yes_or_no(one["is_same"])) for one in results]
    title, bound = "Runs on one node and on several", "the same findings, with the same cause and ranks"
    table = report.table((*columns, "same"), rows)
    report.Report(
        "split_scripts" if options.scripts else "split_runs", title, __doc__, bound, [table], results, []
    ).publish(options.save)
    return 0 if all(one["is_same"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
