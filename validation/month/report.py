"""The month's figures: false alarms per 1,000 days of runs, and the time to detect a fault by its dose."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from testing.report import table
from testing.statistics import percentile
from validation.month.plan import ALERTS, DAY, DOSES, FAULTS, HANG, HOUR
from validation.month.record import SCRAPE

Line = dict[str, Any]
Alarm = dict[str, Any]
SAME_WITHIN = HOUR  # an alert that fires again within an hour of its end flaps


def merged(fired: Iterable[Alarm]) -> list[Alarm]:
    """Merge alerts that users see as one: an alert that becomes critical, or changes its cause, is the same."""
    found: list[Alarm] = []
    for alarm in sorted(fired, key=lambda one: float(one["begins"])):
        former = next((one for one in reversed(found) if _is_same(one, alarm)), None)
        if former is None or alarm["begins"] - former["ends"] > SCRAPE:
            former = {**alarm, "causes": [], "severities": []}
            found.append(former)
        former["ends"] = max(former["ends"], alarm["ends"])
        for name, value in (("causes", alarm.get("cause")), ("severities", alarm.get("severity"))):
            if former[name][-1:] != [value]:
                former[name].append(value)
    return found


def _is_same(one: Alarm, other: Alarm) -> bool:
    return all(one.get(name) == other.get(name) for name in ("alert", "rank", "gpu"))


def flaps(alarms: Sequence[Alarm]) -> int:
    """Return how often an alert fired again soon after its end."""
    return sum(
        any(_is_same(one, other) and 0 < other["begins"] - one["ends"] <= SAME_WITHIN for other in alarms)
        for one in alarms
    )


def body(lines: Sequence[Line]) -> list[str]:
    """Return the paragraphs and tables of the page."""
    days = [line for line in lines if line["kind"] == "day"]
    return [*(_false_alarms(lines, days) if days else ["No days yet."]), *_time_to_detect(lines)]


def _false_alarms(lines: Sequence[Line], days: Sequence[Line]) -> list[str]:
    run_days, judged = sum(line["seconds"] for line in days) / DAY, _judged_days(days)
    alarms = [merged(line["fired"]) for line in days]
    count = Counter(alarm["alert"] for of_day in alarms for alarm in of_day)
    rows = [(name, number, f"{1000 * number / run_days:.2f}") for name, number in count.most_common()]
    rows.append(("**all**", count.total(), f"**{1000 * count.total() / run_days:.2f}**"))
    sizes = [line["ranks"] for line in days]
    return [
        f"False alarms in {run_days:.0f} days of healthy runs of {min(sizes)} to {max(sizes)} ranks. {judged:.0f} of "
        f"these days contain stretches in which an alert is possible; these were judged. {sum(map(flaps, alarms))} "
        "alerts fired again within an hour.",
        table(["alert", "false", "per 1,000 run-days"], rows),
        _whole(lines),
    ]


def _judged_days(lines: Sequence[Line]) -> float:
    return float(sum(line["judged"] for line in lines) * SCRAPE / DAY)


def _whole(lines: Sequence[Line]) -> str:
    """Return whether completely judged days show the same alerts."""
    by_id = {line["id"]: line for line in lines}
    pairs = [(line, by_id.get(f"day/{line['id'].partition('/')[2]}")) for line in lines if line["kind"] == "whole"]
    compared = [(whole, day) for whole, day in pairs if day]
    equal = sum(_alarms(whole) == _alarms(day) for whole, day in compared)
    judged = _judged_days([day for _, day in compared])
    return (
        f"Control of omitted stretches: {len(compared)} days, of which {judged:.1f} days had been judged, were judged "
        f"completely: {equal} show the same alerts."
    )


def _alarms(line: Line) -> list[tuple[str, str | None]]:
    return sorted((alarm["alert"], alarm.get("rank")) for alarm in merged(line["fired"]))


def _time_to_detect(lines: Sequence[Line]) -> list[str]:
    runs = [line for line in lines if line["kind"] == "fault"]
    by_fault: dict[tuple[str, float], list[Line]] = defaultdict(list)
    for line in runs:
        by_fault[line["fault"], line["dose"]].append(line)
    rows = [[fault, *(_cell(by_fault[fault, dose]) for dose in DOSES)] for fault in FAULTS]
    every = [[line for fault in FAULTS for line in by_fault[fault, dose]] for dose in DOSES]
    rows.append(["**all**", *map(_cell, every)])
    alarms = [(line, alarm) for line in runs for alarm in merged(line["fired"])]
    wrong = Counter(alarm["alert"] for line, alarm in alarms if not _is_right(line, alarm))
    again = sum(flaps(merged(line["fired"])) for line in runs)
    causes, severities = (sum(len(alarm[name]) - 1 for _, alarm in alarms) for name in ("causes", "severities"))
    return [
        "Seconds from the onset until the right alert fires, by the factor of the step time: median, P90, and how many "
        "of how many were detected. `-` is never: not within half an hour.",
        table(["fault", *(f"{dose:g}" for dose in DOSES)], rows),
        f"A hang: {_cell(by_fault[HANG, 1.0])}. In addition to the right alert: {dict(wrong) or 'nothing'}. Fired "
        f"again: {again}. Of {len(alarms)} alerts, changes of the cause: {causes}, of the severity: {severities}.",
    ]


def _is_right(line: Line, alarm: Alarm) -> bool:
    is_the_rank = "rank" not in alarm or alarm["rank"] == str(line["culprit"])
    return bool(alarm["alert"] == ALERTS[line["fault"]] and is_the_rank and alarm["begins"] >= line["onset"])


def _cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    waited = [
        min((alarm["begins"] - line["onset"] for alarm in line["fired"] if _is_right(line, alarm)), default=math.inf)
        for line in lines
    ]
    number = sum(map(math.isfinite, waited))
    return f"{_seconds(percentile(waited, 0.5))}, {_seconds(percentile(waited, 0.9))}, {number}/{len(lines)}"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "-"
