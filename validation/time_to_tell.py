"""How long the rules take to tell of a fault: recorded runs replayed at a scrape interval, from the onset to firing.

    python -m validation.time_to_tell --speeds 15s 5s

What is counted is from the first scrape that can show the fault to the first evaluation in which the right alert
fires. To that come the time from the onset to that scrape, half an interval on average, and what Alertmanager waits.
The recordings are the gauntlet's (tests/rules/recorded), stretched as testing/replay.py says.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from testing import promtool, replay
from testing.recording import RECORDED, Recording

SPEEDS = {speed.name: speed for speed in (promtool.PRODUCTION, promtool.BRISK)}
NOT_COUNTED = {
    "RankscopeCheckpointOverdue": "its limit is hours: 4 h",
    "RankscopeCheckpointSlow": "its limit is a part of an hour",
    "RankscopeLowUtilisation": "a property of the job: 15 min",
    "RankscopeStartupSlow": "a property of the job: 10 min",
    "RankscopeGpuUnused": "a property of the allocation: 10 min",
}
"""What nobody has to be told within minutes, and its own bound."""


def seconds(recordings: Sequence[Recording], speed: promtool.Speed, path: Path) -> dict[str, float]:
    """By case, from the first scrape that can show the fault until the right alert fires; absent if it never does."""
    found: dict[str, float] = {}
    for test in replay.timed(recordings, speed):
        for text, when in re.findall(r"\{(alertname=[^}]*)\} ([^\s,]+)", promtool.complaint(test, speed, path)):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
            for recording in recordings:
                is_its = recording.case in (labels.get("run"), labels.get("node"), labels.get("instance"))
                if is_its and recording.told.items() <= labels.items():
                    waited = float(when) - replay.onset()
                    found[recording.case] = min(waited, found.get(recording.case, waited))
    return found


def table(recordings: Sequence[Recording], by_speed: Mapping[str, Mapping[str, float]]) -> str:
    """The report: one row a fault, and the median and P90 of those that count."""
    lines = [
        "# How soon a fault is told",
        "",
        "Seconds from the first scrape that can show a recorded fault of the gauntlet (steps 1.4 times as long) to the",
        "first evaluation in which its alert fires, by the rules for scrapes each 15 s and each 5 s, in Prometheus'",
        "engine (promtool). To that come half an interval on average, and what Alertmanager waits: 5 s if the alert is",
        "critical, else 30. What has a bound of its own is not counted. Made by `python -m validation.time_to_tell`.",
        "",
        f"| fault | alert | {' | '.join(by_speed)} | |",
        f"|---|---|{'---|' * len(by_speed)}---|",
    ]
    for recording in recordings:
        alert = recording.told["alertname"]
        times = [_seconds(by_speed[speed].get(recording.case)) for speed in by_speed]
        lines.append(f"| `{recording.case}` | {alert} | {' | '.join(times)} | {NOT_COUNTED.get(alert, '')} |")
    counted = [recording.case for recording in recordings if recording.told["alertname"] not in NOT_COUNTED]
    for name, part in (("median", 0.5), ("P90", 0.9)):
        values = [_quantile([times.get(case, float("inf")) for case in counted], part) for times in by_speed.values()]
        lines.append(f"| **{name} of {len(counted)}** | | {' | '.join(_seconds(value) for value in values)} | |")
    return "\n".join(lines) + "\n"


def _quantile(values: Sequence[float], part: float) -> float:
    """The least value that so many are not above."""
    return sorted(values)[ceil(len(values) * part) - 1]


def _seconds(value: float | None) -> str:
    return "not told" if value is None else f"{value:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name begins so")
    options = parser.parse_args(arguments)
    recordings = [recording for recording in map(Recording.read, sorted(RECORDED.glob("*.json"))) if recording.told]
    recordings = [one for one in recordings if not options.only or one.case.startswith(tuple(options.only))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "test.yml"
        by_speed = {name: seconds(recordings, SPEEDS[name], path) for name in options.speeds}
    sys.stdout.write(table(recordings, by_speed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
