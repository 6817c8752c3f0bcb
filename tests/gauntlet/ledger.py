"""The ledger: a line of JSON a run, so that a gauntlet that was interrupted goes on where it was; and its summary."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

Line = dict[str, Any]


class Ledger:
    """A file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, run_id: str) -> bool:
        """Whether that run is done."""
        return any(line["id"] == run_id for line in self.lines)

    def add(self, line: Line) -> None:
        """One more, at once."""
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures: of faults at the loud dose, of decoys, of pairs; then by dose and by case."""
    faults = [line for line in lines if line["kind"] == "fault"]
    loud = max((line["dose"] for line in faults), key=[line["dose"] for line in faults].count, default=None)
    decoys = [line for line in lines if line["kind"] == "decoy"]
    hours = sum(line["watched_seconds"] for line in lines) / 3600
    return {
        **figures([line for line in faults if line["dose"] == loud]),
        "dose": loud,
        "decoy_runs": len(decoys),
        "decoys_with_alarm": sum(bool(line["false_alarms"]) for line in decoys),
        "false_alarms": sum(len(line["false_alarms"]) for line in lines),
        "false_alarms_per_hour": round(sum(len(line["false_alarms"]) for line in lines) / hours, 2) if hours else None,
        "hours_watched": round(hours, 2),
        "pairs": pair_figures([line for line in lines if line["kind"] == "pair"]),
        "by_dose": {f"{dose:g}": figures(of_dose) for dose, of_dose in _grouped(faults, "dose")},
        "by_case": {name: figures(of_case) for name, of_case in _grouped(faults, "case")},
        "decoys": {name: _decoy_figures(of_case) for name, of_case in _grouped(decoys, "case")},
        "mean_load": round(sum(line["load"] for line in lines) / len(lines), 2) if lines else None,
    }


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Of runs of one fault each. Seconds are from the onset to the webhook, of those that were told."""
    verdicts = [line["verdicts"][0] for line in lines]
    seconds = sorted(verdict["seconds"] for verdict in verdicts if verdict["seconds"] is not None)
    return {
        "fault_runs": len(lines),
        "fired": sum(verdict["fired"] for verdict in verdicts),
        "place_right": sum(verdict["place_right"] for verdict in verdicts),
        "cause_right": sum(verdict["cause_right"] for verdict in verdicts),
        "resolved": sum(line["resolved"] for line in lines),
        "p90_seconds": percentile_90(seconds),
        "max_seconds": seconds[-1] if seconds else None,
    }


def pair_figures(lines: Sequence[Line]) -> dict[str, int]:
    """Both named, or one and the other not contradicted: no alert that is neither's."""
    fired = [[verdict["fired"] for verdict in line["verdicts"]] for line in lines]
    contradicted = [bool(line["false_alarms"]) for line in lines]
    return {
        "pair_runs": len(lines),
        "both": sum(map(all, fired)),
        "at_least_one_uncontradicted": sum(
            any(some) and not bad for some, bad in zip(fired, contradicted, strict=True)
        ),
    }


def percentile_90(ascending: Sequence[float]) -> float | None:
    """The smallest value that at least 90 % are not above; None of nothing."""
    if len(ascending) < 2:
        return ascending[0] if ascending else None
    return round(quantiles(ascending, n=10, method="inclusive")[-1], 2)


def table(lines: Sequence[Line]) -> str:
    """For people."""
    rows = [f"{'case':28} {'dose':>5} {'runs':>4} {'fired':>5} {'place':>5} {'cause':>5} {'seconds':>14} {'false':>5}"]
    for (name, dose), of_both in sorted(_by(lines, "case", "dose").items()):
        row = f"{name[:28]:28} {dose:5g} {len(of_both):4} "
        if of_both[0]["kind"] == "fault":
            row += _fault_columns(of_both)
        else:
            row += f"{sum(v['fired'] for line in of_both for v in line['verdicts']):5} {'':26}"
        rows.append(row + f" {sum(len(line['false_alarms']) for line in of_both):5}")
    return "\n".join(rows)


def _fault_columns(lines: Sequence[Line]) -> str:
    found = figures(lines)
    seconds = [line["verdicts"][0]["seconds"] for line in lines if line["verdicts"][0]["fired"]]
    span = f"{min(seconds):.1f}-{max(seconds):.1f}" if seconds else ""
    return f"{found['fired']:5} {found['place_right']:5} {found['cause_right']:5} {span:>14}"


def _decoy_figures(lines: Sequence[Line]) -> dict[str, int]:
    return {"decoy_runs": len(lines), "false_alarms": sum(len(line["false_alarms"]) for line in lines)}


def _grouped(lines: Iterable[Line], key: str) -> Iterator[tuple[Any, list[Line]]]:
    yield from sorted((of_one[0][key], of_one) for of_one in _by(lines, key).values())


def _by(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        groups[tuple(line[key] for key in keys)].append(line)
    return groups
