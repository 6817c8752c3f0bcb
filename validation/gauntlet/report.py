"""What the ledger amounts to: figures as JSON, and a table for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median, quantiles
from typing import Any

from testing.job.device import ASYNCHRONOUS, GLOO
from validation.gauntlet.ledger import Line

HEADS = {
    GLOO: """\
# The gauntlet

`make gauntlet` injects each fault and decoy into a real training job of four ranks (torchrun, gloo, loader workers,
checkpoints) beside simulated GPUs; exporter, Prometheus, Alertmanager and the receiver are real, at the fast speed. The
time of the device is slept in every case; what else is not real stands in the last column. Seconds are from the onset
to the receiver: median, and the most. `place` and `cause` are those of the first notification.

""",
    ASYNCHRONOUS: """\
# The gauntlet on the asynchronous device

`make gauntlet GAUNTLET='--device asynchronous'` injects each fault and decoy about ranks into a real training job of
four ranks (torchrun, loader workers, checkpoints) on a device that is as asynchronous as CUDA's: the host issues work
and collectives and waits only where it reads a value. The device (testing/asynchronous_device) and the GPUs are
simulated; exporter, Prometheus, Alertmanager and the receiver are real, at the fast speed. What else is not real stands
in the last column. Seconds are from the onset to the receiver: median, and the most. `place` and `cause` are those of
the first notification.

""",
}
RUNBOOKS = """
## Runbooks

Every query of an alert's runbook, asked while its fault lasted. It is right if it returns something (or may return
nothing, as the page says), and names the place of the fault first if it is sorted.

| alert | query | asked | right |
| --- | --- | --- | --- |
"""
NAMES = ("case", "what", "dose", "runs")
VERDICTS = ("notified", "place", "cause", "resolved", "seconds")
COLUMNS = (*NAMES, *VERDICTS, "false alarms", "simulated")


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
    """For people, in Markdown: a row a case and dose."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [_row(name, dose, of_both) for (name, dose), of_both in sorted(_by(lines, "case", "dose").items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def runbooks(lines: Sequence[Line]) -> str:
    """The same for the queries of the runbooks, if any were asked. Not of pairs: each fault hides the other."""
    asked = [one for line in lines if line["kind"] == "fault" for one in line.get("runbook", ())]
    rows = [
        f"| {alert} | {number} | {len(ones)} | {sum(one['right'] for one in ones)} |\n"
        for (alert, number), ones in sorted(_by(asked, "alert", "query").items())
    ]
    return RUNBOOKS + "".join(rows) if rows else ""


def _row(name: str, dose: float, lines: Sequence[Line]) -> tuple[str, ...]:
    columns = _verdict_columns(lines) if lines[0]["verdicts"] else ("",) * len(VERDICTS)
    false = str(sum(len(line["false_alarms"]) for line in lines))
    return (f"`{name}`", lines[0]["title"], f"{dose:g}", str(len(lines)), *columns, false, lines[0]["simulated"])


def _verdict_columns(lines: Sequence[Line]) -> tuple[str, ...]:
    """Of pairs both are counted."""
    verdicts = [verdict for line in lines for verdict in line["verdicts"]]
    counts = [sum(verdict[what] for verdict in verdicts) for what in ("fired", "place_right", "cause_right")]
    seconds = [verdict["seconds"] for verdict in verdicts if verdict["fired"]]
    span = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
    return (*(f"{count}/{len(verdicts)}" for count in counts), str(sum(line["resolved"] for line in lines)), span)


def _decoy_figures(lines: Sequence[Line]) -> dict[str, int]:
    return {"decoy_runs": len(lines), "false_alarms": sum(len(line["false_alarms"]) for line in lines)}


def _grouped(lines: Iterable[Line], key: str) -> Iterator[tuple[Any, list[Line]]]:
    yield from sorted((of_one[0][key], of_one) for of_one in _by(lines, key).values())


def _by(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        groups[tuple(line[key] for key in keys)].append(line)
    return groups
