"""Asks Prometheus what a run has left there: the series that the rules ask for, for their tests at production speed."""

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
OLD_NEWS = "rankscope_gpu_xid_last_timestamp_seconds"  # of an earlier run: at production speed it is still told
OF_THE_MACHINE = ("rankscope_exporter_time_seconds", "rankscope_exporter_build_info")  # no replay has its clock
HEALTHY = 14.0  # seconds before the fault; the runner waits so long without any alert


def record(prometheus: Prometheus, run: Run, line: Line) -> Recording:
    """What a run left there, once the ledger's line says what was told of it."""
    since, until = line["injected"] - HEALTHY, line["ended"]
    moment = f"[{round(until - since)}s] @ {until}"
    scrapes = [when for when, _ in prometheus.query(SCRAPES + moment)[0]["values"]]
    found = [series for selector in selectors() for series in prometheus.query(selector + moment)]
    healthy = sum(when < line["injected"] for when in scrapes)
    return Recording(run.id, right_labels(run, line), healthy, len(scrapes), series_of(found, scrapes))


def is_right(line: Line) -> bool:
    """Whether the job trained before, and all was told with its place and cause, and nothing else."""
    verdicts, trained = line["verdicts"], line["step_seconds"][0] is not None
    return (
        trained
        and not line["false_alarms"]
        and all(v["fired"] and v["place_right"] and v["cause_right"] for v in verdicts)
    )


def right_labels(run: Run, line: Line) -> dict[str, str]:
    """Of what was told the labels that were judged: the name, and place and cause where the case has them."""
    if not line["verdicts"]:
        return {}
    (case, target), told = run.cases[0], line["verdicts"][0]["labels"]
    judged = ["alertname", *case.place(target), *(["cause"] if case.alerts[told["alertname"]] else [])]
    return {name: told[name] for name in judged}


@cache
def selectors() -> list[str]:
    """All that the rules ask the exporter for. What only the texts of alerts ask for is not among it."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found = {found for rule in group["rules"] for found in SELECTOR.findall(rule["expr"])}
    return sorted(selector for selector in found if not selector.startswith(OF_THE_MACHINE))


@cache
def words() -> frozenset[str]:
    """All that occur in the rules."""
    return frozenset(re.findall(r"\w+", RULES.read_text()))


def series_of(found: Iterable[Mapping[str, Any]], scrapes: Sequence[float]) -> Series:
    """Prometheus's answer by series and place. A restarted rank goes on in the series of its predecessor."""
    number = {when: n for n, when in enumerate(scrapes)}
    series: Series = defaultdict(lambda: defaultdict(lambda: [None] * len(scrapes)))
    for one in found:
        name, place = _name_and_place(one["metric"])
        if name.startswith(OLD_NEWS) and float(one["values"][-1][1]) < scrapes[0]:
            continue
        for when, value in one["values"]:
            if when in number:
                series[name][place][number[when]] = float(value) - (scrapes[0] if is_timestamp(name) else 0.0)
    return {name: dict(places) for name, places in series.items()}


def _name_and_place(metric: Mapping[str, str]) -> tuple[str, str]:
    """Without what follows from the run, the place (a GPU's uuid from its index) or the versions of things."""
    name = metric["__name__"]
    place = next((label for label in ("gpu", "rank") if name.startswith(f"rankscope_{label}_")), "")
    dropped = {"__name__", "job", "instance", "run", "node", place, *(["uuid"] if place == "gpu" else [])}
    if name.endswith("_info"):
        dropped |= metric.keys() - words() | {"name"}
    text = ",".join(f'{label}="{metric[label]}"' for label in sorted(metric.keys() - dropped))
    return f"{name}{{{text}}}", metric.get(place, "")
