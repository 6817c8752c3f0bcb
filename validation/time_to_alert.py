"""Measure how long the rules take to detect a fault: recorded runs, replayed at a scrape interval.

    python -m validation.time_to_alert --save

Seconds are from the first scrape that can show the fault to the first evaluation in which its alert fires, in
Prometheus' engine (promtool), with the rules for scrape intervals of 15 s and 5 s. Add half an interval on average for
the time from the onset to that scrape, and Alertmanager's wait: 5 s for a critical alert, else 30 s. The recordings are
the gauntlet's (tests/rules/recorded; steps 1.4 times as long), stretched as in testing/replay.py. Median and P90
exclude alerts with their own bound.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing import promtool, replay, report
from testing.recording import RECORDED, Recording
from testing.statistics import percentile

SPEEDS = {speed.name: speed for speed in (promtool.PRODUCTION, promtool.BRISK)}
NOT_COUNTED = {
    "RankscopeCheckpointOverdue": "its limit is hours: 4 h",
    "RankscopeCheckpointSlow": "its limit is a part of an hour",
    "RankscopeLowUtilization": "a property of the job: 15 min",
    "RankscopeStartupSlow": "a property of the job: 10 min",
    "RankscopeGpuUnused": "a property of the allocation: 10 min",
}
"""Alerts that need not fire within minutes, with their bounds."""


def seconds(recordings: Sequence[Recording], speed: promtool.Speed, path: Path) -> dict[str, float]:
    """Return the seconds from the first scrape that can show the fault to the right alert, by case; absent if never."""
    found: dict[str, float] = {}
    for test in replay.timed(recordings, speed):
        for text, when in re.findall(r"\{(alertname=[^}]*)\} ([^\s,]+)", promtool.complaint(test, speed, path)):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
            for recording in recordings:
                is_same_run = recording.case in (labels.get("run"), labels.get("node"), labels.get("instance"))
                if is_same_run and recording.expected.items() <= labels.items():
                    waited = float(when) - replay.onset()
                    found[recording.case] = min(waited, found.get(recording.case, waited))
    return found


def table(recordings: Sequence[Recording], by_speed: Mapping[str, Mapping[str, float]]) -> str:
    """Return a row for each fault, and the median and P90 of those that count."""
    rows = []
    for recording in recordings:
        alert = recording.expected["alertname"]
        times = [_seconds(by_speed[speed].get(recording.case, math.inf)) for speed in by_speed]
        rows.append([f"`{recording.case}`", alert, *times, NOT_COUNTED.get(alert, "")])
    counted = [recording.case for recording in recordings if recording.expected["alertname"] not in NOT_COUNTED]
    for name, part in (("median", 0.5), ("P90", 0.9)):
        values = [percentile([times.get(case, math.inf) for case in counted], part) for times in by_speed.values()]
        rows.append([f"**{name} of {len(counted)}**", "", *map(_seconds, values), ""])
    return report.table(["fault", "alert", *by_speed, ""], rows)


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if math.isfinite(value) else "not detected"


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name starts with this")
    options = parser.parse_args()
    recordings = [recording for recording in map(Recording.read, sorted(RECORDED.glob("*.json"))) if recording.expected]
    recordings = [one for one in recordings if not options.only or one.case.startswith(tuple(options.only))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "test.yml"
        by_speed = {name: seconds(recordings, SPEEDS[name], path) for name in options.speeds}
    title, bound = "Time to detect a fault", "none, except for alerts with one in the last column"
    report.Report("time_to_alert", title, __doc__, bound, [table(recordings, by_speed)], by_speed).publish(options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
