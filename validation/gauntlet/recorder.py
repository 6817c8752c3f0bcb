"""Record from Prometheus the series of a run that the rules read, for the rules' tests at production speed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from testing.recording import Recording, Series, is_timestamp
from testing.report import Line
from testing.servers import Prometheus
from validation.gauntlet.schedule import Run

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules/15s.yml"
SELECTOR = re.compile(r"(?<![\w:])rankscope_\w+(?![\w:])(?:\{[^}]*\})?")
SCRAPES = 'up{job="rankscope"}'
XID_TIME = "rankscope_gpu_xid_last_timestamp_seconds"  # an earlier run's would alert at production speed
HOST_METRICS = ("rankscope_exporter_time_seconds", "rankscope_exporter_build_info")  # a replay has another clock
HEALTHY = 14.0  # seconds before the fault; the runner waits this long without an alert


def record(prometheus: Prometheus, run: Run, line: Line) -> Recording:
    """Return the recording of a run, with the right labels from its line of the ledger."""
    since, until = line["injected"] - HEALTHY, line["ended"]
    moment = f"[{round(until - since)}s] @ {until}"
    scrapes = [when for when, _ in prometheus.query(SCRAPES + moment)[0]["values"]]
    found = [series for selector in selectors() for series in prometheus.query(selector + moment)]
    healthy = sum(when < line["injected"] for when in scrapes)
    return Recording(run.id, right_labels(run, line), healthy, len(scrapes), series_of(found, scrapes))


def is_right(line: Line) -> bool:
    """Return whether the job trained, each fault was notified with place and cause, and nothing else was notified."""
    verdicts, trained = line["verdicts"], line["step_seconds"][0] is not None
    return (
        trained
        and not line["false_alarms"]
        and all(v["fired"] and v["place_right"] and v["cause_right"] for v in verdicts)
    )


def right_labels(run: Run, line: Line) -> dict[str, str]:
    """Return the judged labels of the first notification: its name, and place and cause if the case has them."""
    if not line["verdicts"]:
        return {}
    (case, target), labels = run.cases[0], line["verdicts"][0]["labels"]
    judged = ["alertname", *case.place(target), *(["cause"] if case.alerts[labels["alertname"]] else [])]
    return {name: labels[name] for name in judged}


@cache
def selectors() -> list[str]:
    """Return all selectors of exporter metrics in the rules' expressions, without those in the texts of alerts."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found = {found for rule in group["rules"] for found in SELECTOR.findall(rule["expr"])}
    return sorted(selector for selector in found if not selector.startswith(HOST_METRICS))


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", RULES.read_text()))


def series_of(found: Iterable[Mapping[str, Any]], scrapes: Sequence[float]) -> Series:
    """Return Prometheus' answer by series and place. A restarted rank continues the series of its predecessor."""
    number = {when: n for n, when in enumerate(scrapes)}
    series: Series = defaultdict(lambda: defaultdict(lambda: [None] * len(scrapes)))
    for one in found:
        name, place = _name_and_place(one["metric"])
        if name.startswith(XID_TIME) and float(one["values"][-1][1]) < scrapes[0]:
            continue
        for when, value in one["values"]:
            if when in number:
                series[name][place][number[when]] = float(value) - (scrapes[0] if is_timestamp(name) else 0.0)
    return {name: dict(places) for name, places in series.items()}


def _name_and_place(metric: Mapping[str, str]) -> tuple[str, str]:
    """Return series and place without labels that follow from the run, the place (a GPU's uuid) or versions."""
    name = metric["__name__"]
    place = next((label for label in ("gpu", "rank") if name.startswith(f"rankscope_{label}_")), "")
    dropped = {"__name__", "job", "instance", "run", "node", place, *(["uuid"] if place == "gpu" else [])}
    if name.endswith("_info"):
        dropped |= metric.keys() - words() | {"name"}
    text = ",".join(f'{label}="{metric[label]}"' for label in sorted(metric.keys() - dropped))
    return f"{name}{{{text}}}", metric.get(place, "")
