"""Compare the findings about a run on one node with those about the same run on two and four nodes.

    python -m validation.split_runs --save

Simulated ranks (`testing/split_training.py`), eight of them, in steps of 0.2 s. On one node, their readings go to the
judge of an exporter. On several, they go through the JSON of `/api/v1/facts`, each third second, to an analyzer.
Seconds are from the onset to the second in whose readings the finding is; a pull comes up to three seconds later.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from testing import report
from testing.readings import EARLY
from testing.split_training import SCENES, Key, SplitTrial, SteppingTraining, opened

from rankscope_exporter.diagnosis.facts import DEVICE, HOST
from rankscope_exporter.diagnosis.findings import Finding

NODES = (2, 4)


def compare(name: str, clock: str, nodes: int) -> dict[str, Any]:
    """Return what both judges find in a scene."""
    trial = SplitTrial(SteppingTraining(8, clock=clock), nodes, EARLY)
    onset = trial.play(SCENES[name])
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
    options = report.parser(__doc__, prog="python -m validation.split_runs").parse_args()
    results = [compare(name, clock, nodes) for name in SCENES for clock in (HOST, DEVICE) for nodes in NODES]
    columns = ("scene", "clock", "nodes", "one node", "several")
    rows = [(*(one[column] for column in columns), report.yes_or_no(one["is_same"])) for one in results]
    title, bound = "Runs on one node and on several", "the same findings, with the same cause and ranks"
    table = report.table((*columns, "same"), rows)
    report.Report("split_runs", title, __doc__, bound, [table], results, []).publish(options.save)
    return 0 if all(one["is_same"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
