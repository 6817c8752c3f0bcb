"""How true the record is in every way to train: `python -m validation.ways` (a quarter of an hour for 1,000 steps).

Each way of testing/ways is trained without and with the hook. The phases are compared with the wall time,
and data wait, checkpoints, evaluations and steps with clocks in the training script. Of each, the worst rank is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from testing.ways import WAYS
from testing.ways.launch import launch

Line = dict[str, Any]
LEGEND = """\
*Harmless*: parameters bit-identical, nothing logged, every patch taken back. *Counted*: as many steps as the script
made. Then, in per cent and of the worst rank: how far the phases' sum is from the wall time, and the steps, data wait,
checkpoints and evaluations from the script's own clocks, where it has one; last the part of the time after start-up
that is `other`."""
CLOCKED = ("data_wait", "checkpoint", "evaluation")


def measure(group: str, steps: int) -> list[Line]:
    """What each rank said of each way of a group."""
    ranks, ways = WAYS[group]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        return launch(ranks, steps, ways, Path(run_dir))


def gap(published: float, clocked: float) -> float:
    """The record's deviation from the script's clock, as a part of it."""
    return (published - clocked) / clocked


def wall_gap(line: Line) -> float:
    """Of all phases' sum, from before `instrument()` to the end."""
    return gap(sum(line["record"]["phases"].values()), line["elapsed"][1])


def step_gap(line: Line) -> float:
    """Of the steps' sum."""
    return gap(line["record"]["step_seconds"], line["script"]["step_seconds"])


def phase_gap(phase: str) -> Callable[[Line], float | None]:
    """Of one phase's sum; None where the script has no clock for it."""

    def phase_gap_of(line: Line) -> float | None:
        clocked = line["script"]["phases"].get(phase)
        return gap(line["record"]["phases"].get(phase, 0.0), clocked) if clocked else None

    return phase_gap_of


def other_share(line: Line) -> float:
    """Part of the time after start-up that no probe explains."""
    phases = line["record"]["phases"]
    return float(phases.get("other", 0.0) / (sum(phases.values()) - phases["startup"]))


COLUMNS: dict[str, Callable[[Line], float | None]] = {
    "wall": wall_gap,
    "steps": step_gap,
    **{phase: phase_gap(phase) for phase in CLOCKED},
    "other": other_share,
}


def worst(lines: Iterable[Line], figure: Callable[[Line], float | None]) -> float | None:
    """The largest figure of any rank, by its amount."""
    return max((value for value in map(figure, lines) if value is not None), key=abs, default=None)


def summary(lines: list[Line]) -> list[dict[str, Any]]:
    """One row a way and number of ranks."""

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


def machine() -> str:
    """What the figures hold for."""
    load = os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores that others may use too (load {load:.1f} at the end), {versions}"


def percent(value: float | None) -> str:
    """With enough places to see 0.1 %; nothing for what was not measured."""
    return "" if value is None else f"{value * 100:.2f}"


def report(rows: list[dict[str, Any]], steps: int, machine: str) -> str:
    """The rows as a page."""
    table = [
        f"| {row['way']} | {row['ranks']} | {'yes' if row['harmless'] else '**no**'} "
        f"| {'yes' if row['steps_counted'] else '**no**'} | {' | '.join(percent(row[name]) for name in COLUMNS)} |"
        for row in rows
    ]
    return "\n".join(
        [
            "# How true the record is, in every way to train",
            "",
            f"{steps} steps of each way, without and with the hook, on {machine}.",
            "",
            LEGEND,
            "",
            f"| way | ranks | harmless | counted | {' | '.join(COLUMNS)} |",
            f"|---|---|---|---|{'---|' * len(COLUMNS)}",
            *table,
            "",
            "Made by `make ways`.",
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", choices=WAYS, action="append", help="by default: all")
    parser.add_argument("--steps", type=int, default=1000, help="of each way (default: 1000)")
    parser.add_argument("--json", type=Path, help="write the figures there, and the report beside it as .md")
    arguments = parser.parse_args()
    lines = [line for group in arguments.group or WAYS for line in measure(group, arguments.steps)]
    result = {"machine": machine(), "steps": arguments.steps, "ways": summary(lines)}
    page = report(result["ways"], arguments.steps, result["machine"])
    print(page)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        arguments.json.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
