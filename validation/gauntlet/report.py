"""The body of the gauntlet's page, from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import RANKS
from testing.report import Line, table
from testing.statistics import percentile
from validation.gauntlet.case import LOUD

ABOUT = {
    GLOO: f"""\
Each fault and decoy is injected into a real training job of {RANKS} ranks (torchrun, gloo, loader workers, checkpoints)
with simulated GPUs. Exporter, Prometheus, Alertmanager and the receiver are real, at the fast speed. The ranks sleep
instead of computing on a device; the last column says what else is simulated. Seconds are from the onset to the
receiver: median and maximum. `place` and `cause` are those of the first notification.""",
    ASYNCHRONOUS: f"""\
Each fault and decoy about ranks is injected into a real training job of {RANKS} ranks (torchrun, loader workers,
checkpoints) on a device that is as asynchronous as CUDA: the host issues work and collectives and waits only where it
reads a value. The device (testing/asynchronous_device) and the GPUs are simulated; exporter, Prometheus, Alertmanager
and the receiver are real, at the fast speed. The last column says what else is simulated. Seconds are from the onset to
the receiver: median and maximum. `place` and `cause` are those of the first notification.""",
}
RUNBOOKS = """\
## Runbooks

Every query of an alert's runbook was run while its fault lasted. An answer is right if it is not empty (or may be
empty, as the page says), and if a sorted one names the place of the fault first."""
VERDICTS = ("notified", "place", "cause", "resolved", "seconds")
COLUMNS = ("case", "what", "dose", "runs", *VERDICTS, "false alarms", "simulated")


def body(lines: Sequence[Line]) -> list[str]:
    """Return the totals, a row for each case and dose, and the queries of the runbooks."""
    rows = [_row(name, dose, of_both) for (name, dose), of_both in sorted(_by(lines, "case", "dose").items())]
    return [totals(lines), table(COLUMNS, rows), *_runbooks(lines)]


def totals(lines: Sequence[Line]) -> str:
    """Return the counts of all runs at the loud dose."""
    loud = [line for line in lines if line["dose"] == LOUD]
    faults, decoys, pairs = ([line for line in loud if line["kind"] == kind] for kind in ("fault", "decoy", "pair"))
    verdicts = [line["verdicts"][0] for line in faults]
    right = sum(verdict["fired"] and verdict["place_right"] and verdict["cause_right"] for verdict in verdicts)
    both = sum(all(verdict["fired"] for verdict in line["verdicts"]) for line in pairs)
    silent = sum(not line["false_alarms"] for line in decoys)
    false = sum(bool(line["false_alarms"]) for line in [*faults, *pairs])
    seconds = [verdict["seconds"] for verdict in verdicts if verdict["fired"]]
    last = f"{percentile(seconds, 0.9):.1f} s, {max(seconds, default=0):.1f} s"
    rows = [
        ("faults notified, with the right place and cause", f"{right} of {len(faults)}"),
        ("pairs of faults, both notified", f"{both} of {len(pairs)}"),
        ("onset to notification of a fault: P90, maximum", last),
        ("runs of decoys without a notification", f"{silent} of {len(decoys)}"),
        ("runs with faults that have a false alarm", f"{false} of {len(faults) + len(pairs)}"),
    ]
    return table((f"steps {LOUD:g} times as long", ""), rows)


def _runbooks(lines: Sequence[Line]) -> list[str]:
    """Return the queries that were run. None are run for pairs, because each fault hides the other."""
    asked = [one for line in lines if line["kind"] == "fault" for one in line.get("runbook", ())]
    rows = [
        (alert, number, len(ones), sum(one["right"] for one in ones))
        for (alert, number), ones in sorted(_by(asked, "alert", "query").items())
    ]
    return [RUNBOOKS, table(("alert", "query", "asked", "right"), rows)] if rows else []


def _row(name: str, dose: float, lines: Sequence[Line]) -> tuple[object, ...]:
    columns = _verdict_columns(lines) if lines[0]["verdicts"] else ("",) * len(VERDICTS)
    false = sum(len(line["false_alarms"]) for line in lines)
    return (f"`{name}`", lines[0]["title"], f"{dose:g}", len(lines), *columns, false, lines[0]["simulated"])


def _verdict_columns(lines: Sequence[Line]) -> tuple[object, ...]:
    """Return the counts; both faults of a pair count."""
    verdicts = [verdict for line in lines for verdict in line["verdicts"]]
    counts = [sum(verdict[what] for verdict in verdicts) for what in ("fired", "place_right", "cause_right")]
    seconds = [verdict["seconds"] for verdict in verdicts if verdict["fired"]]
    span = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
    return (*(f"{count}/{len(verdicts)}" for count in counts), sum(line["resolved"] for line in lines), span)


def _by(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        groups[tuple(line[key] for key in keys)].append(line)
    return groups
