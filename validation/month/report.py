"""The month's figures: false alarms per 1,000 days of runs, and how soon a fault is told by how much it costs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from testing.simulated_node import markdown
from validation.month.plan import ALERTS, DAY, DOSES, FAULTS, HANG, HOUR
from validation.month.record import SCRAPE

Line = dict[str, Any]
Alarm = dict[str, Any]
SAME_WITHIN = HOUR  # what fires again within an hour of its end flaps


def read(ledger: Path) -> list[Line]:
    """What is done so far."""
    return [json.loads(text) for text in ledger.read_text().splitlines()] if ledger.exists() else []


def told(fired: Iterable[Alarm]) -> list[Alarm]:
    """Alerts as people think of them: one that becomes critical, or has another cause by then, is the same."""
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
    """How often one fired again soon after its end."""
    return sum(
        any(_is_same(one, other) and 0 < other["begins"] - one["ends"] <= SAME_WITHIN for other in alarms)
        for one in alarms
    )


def page(lines: Sequence[Line]) -> str:
    """The report for people."""
    return "\n".join([*_false_alarms(lines), "", *_time_to_tell(lines), ""])


def _false_alarms(lines: Sequence[Line]) -> list[str]:
    days = [line for line in lines if line["kind"] == "day"]
    run_days = sum(line["seconds"] for line in days) / DAY
    judged = sum(line["judged"] for line in days) * SCRAPE / DAY
    count: Counter[str] = Counter()
    flapping = 0
    for line in days:
        alarms = told(line["fired"])
        count.update(alarm["alert"] for alarm in alarms)
        flapping += flaps(alarms)
    if not days:
        return ["No days yet."]
    rows = [[name, str(number), f"{1000 * number / run_days:.2f}"] for name, number in count.most_common()]
    sizes = [line["ranks"] for line in days]
    total = sum(count.values())
    rows.append(["**all**", str(total), f"**{1000 * total / run_days:.2f}**"])
    return [
        f"False alarms in {run_days:.0f} days of healthy runs of {min(sizes)} to {max(sizes)} ranks, of which "
        f"{judged:.0f} days may tell of anything and were judged; {flapping} fired again within an hour.",
        "",
        markdown(["alert", "false", "per 1,000 run-days"], rows),
        "",
        *_whole(lines),
    ]


def _whole(lines: Sequence[Line]) -> list[str]:
    """Whether the days that were judged whole have told the same."""
    by_id = {line["id"]: line for line in lines}
    pairs = [(line, by_id.get(f"day/{line['id'].partition('/')[2]}")) for line in lines if line["kind"] == "whole"]
    compared = [(whole, day) for whole, day in pairs if day]
    alike = sum(_alarms(whole) == _alarms(day) for whole, day in compared)
    judged = sum(day["judged"] for _, day in compared) * SCRAPE / DAY
    return [
        f"What was left out: {len(compared)} of these days were judged whole too, of which {judged:.1f} days had been "
        f"judged: {alike} told the same."
    ]


def _alarms(line: Line) -> list[tuple[str, str | None]]:
    return sorted((alarm["alert"], alarm.get("rank")) for alarm in told(line["fired"]))


def _time_to_tell(lines: Sequence[Line]) -> list[str]:
    runs = [line for line in lines if line["kind"] == "fault"]
    by_fault: dict[tuple[str, float], list[Line]] = defaultdict(list)
    for line in runs:
        by_fault[line["fault"], line["dose"]].append(line)
    heads = ["fault", *(f"{dose:g}" for dose in DOSES)]
    rows = [[fault, *(_cell(by_fault[fault, dose]) for dose in DOSES)] for fault in FAULTS]
    every = [[line for fault in FAULTS for line in by_fault[fault, dose]] for dose in DOSES]
    rows.append(["**all**", *map(_cell, every)])
    wrong = Counter(alarm["alert"] for line in runs for alarm in told(line["fired"]) if not _is_right(line, alarm))
    again = sum(flaps(told(line["fired"])) for line in runs)
    others = [alarm for line in runs for alarm in told(line["fired"])]
    causes, severities = (sum(len(alarm[name]) - 1 for alarm in others) for name in ("causes", "severities"))
    hangs = by_fault[HANG, 1.0]
    return [
        "Seconds from the onset until the right alert fires, by how many times as long a step takes: median, P90, and "
        "how many of how many were told. `-` is never: within half an hour.",
        "",
        markdown(heads, rows),
        "",
        f"A hang: {_cell(hangs)}. Beside the right alert: {dict(wrong) or 'nothing'}. Fired again: {again}. "
        f"Of {len(others)} alerts, changes of the cause: {causes}, of the severity: {severities}.",
    ]


def _is_right(line: Line, alarm: Alarm) -> bool:
    is_the_rank = "rank" not in alarm or alarm["rank"] == str(line["culprit"])
    return bool(alarm["alert"] == ALERTS[line["fault"]] and is_the_rank and alarm["begins"] >= line["onset"])


def _cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    waited = sorted(
        min(
            (alarm["begins"] - line["onset"] for alarm in line["fired"] if _is_right(line, alarm)), default=float("inf")
        )
        for line in lines
    )
    median, last = (waited[ceil(part * len(waited)) - 1] for part in (0.5, 0.9))
    number = sum(value < float("inf") for value in waited)
    return f"{_seconds(median)}, {_seconds(last)}, {number}/{len(lines)}"


def _seconds(value: float) -> str:
    return "-" if value == float("inf") else f"{value:.0f}"
