"""Check the accuracy of the record in every way to train.

    python -m validation.ways --save

Each way of testing/ways is trained without and with the hook. *Harmless*: parameters are bit-identical, nothing is
logged, every patch is undone. *Counted*: as many steps as the script made. The other columns are percentages of the
worst rank: the error of the sum of phases compared with the wall time, and of steps, data wait, checkpoints and
evaluations compared with the script's own clocks, where it has one. The last one is the ratio of the time after
start-up that is `other`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from testing import report
from testing.ways import WAYS
from testing.ways.launch import launch

Line = dict[str, Any]
CLOCKED = ("data_wait", "checkpoint", "evaluation")


def measure(group: str, steps: int) -> list[Line]:
    """Return the line of each rank about each way of a group."""
    ranks, ways = WAYS[group]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        return launch(ranks, steps, ways, Path(run_dir))


def gap(published: float, clocked: float) -> float:
    """Return the record's relative deviation from the script's clock."""
    return (published - clocked) / clocked


def wall_gap(line: Line) -> float:
    """Return the deviation of all phases' sum, from before `instrument()` to the end."""
    return gap(sum(line["record"]["phases"].values()), line["elapsed"][1])


def step_gap(line: Line) -> float:
    """Return the deviation of the steps' sum."""
    return gap(line["record"]["step_seconds"], line["script"]["step_seconds"])


def phase_gap(phase: str) -> Callable[[Line], float | None]:
    """Return a function for one phase's deviation; None if the script has no clock for it."""

    def phase_gap_of(line: Line) -> float | None:
        clocked = line["script"]["phases"].get(phase)
        return gap(line["record"]["phases"].get(phase, 0.0), clocked) if clocked else None

    return phase_gap_of


def other_share(line: Line) -> float:
    """Return the ratio of the time after start-up that no probe explains."""
    phases = line["record"]["phases"]
    return float(phases.get("other", 0.0) / (sum(phases.values()) - phases["startup"]))


COLUMNS: dict[str, Callable[[Line], float | None]] = {
    "wall": wall_gap,
    "steps": step_gap,
    **{phase: phase_gap(phase) for phase in CLOCKED},
    "other": other_share,
}


def worst(lines: Iterable[Line], figure: Callable[[Line], float | None]) -> float | None:
    """Return the figure of any rank that is largest by amount."""
    return max((value for value in map(figure, lines) if value is not None), key=abs, default=None)


def summary(lines: list[Line]) -> list[dict[str, Any]]:
    """Return one row for each way and number of ranks."""

    def key(line: Line) -> tuple[str, int]:
        return line["way"], line["world_size"]

    rows = []
    for (way, ranks), group in groupby(sorted(lines, key=key), key):
        members = list(group)
        figures = {name: worst(members, figure) for name, figure in COLUMNS.items()}
        identical = all(line["identical"] and not line["messages"] and not line["not_restored"] for line in members)
        counted = all(line["record"]["steps"] == line["script"]["steps"] for line in members)
        rows.append({"way": way, "ranks": ranks, "harmless": identical, "steps_counted": counted, **figures})
    return rows


def percent(value: float | None) -> str:
    """Return a percentage with enough digits to see 0.1%; nothing without a value."""
    return "" if value is None else f"{value * 100:.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            *(row["way"], row["ranks"], report.yes_or_no(row["harmless"]), report.yes_or_no(row["steps_counted"])),
            *(percent(row[name]) for name in COLUMNS),
        )
        for row in rows
    ]
    return report.table(("way", "ranks", "harmless", "counted", *COLUMNS), cells)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--group", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each way (default: 1000)")
    options = parser.parse_args()
    lines = [line for group in options.group or WAYS for line in measure(group, options.steps)]
    rows = summary(lines)
    title, bound = "Accuracy of the record in every way to train", "harmless and counted"
    body = [f"{options.steps} steps of each way.", table(rows)]
    report.Report("ways", title, __doc__, bound, body, rows, ["torch"]).publish(options.save)


if __name__ == "__main__":
    main()
