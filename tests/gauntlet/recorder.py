"""Asks Prometheus what a run has left there: the series that the rules ask for, in the form that the rules' tests read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from examples.demo.servers import Prometheus
from tests.rules.recording import Recording, Series, is_timestamp

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules/production"
SELECTOR = re.compile(r"(?<![\w:])rankscope_\w+(?![\w:])(?:\{[^}]*\})?")
SCRAPES = 'up{job="rankscope"}'


def record(prometheus: Prometheus, run: str, told: dict[str, str], since: float, onset: float, now: float) -> Recording:
    """What the run left between `since` and `now`, in unix time; at `onset` it began to go wrong."""
    span = f"[{int(now - since)}s]"
    scrapes = [when for when, _ in prometheus.query(SCRAPES + span)[0]["values"]]
    found = [series for selector in selectors() for series in prometheus.query(selector + span)]
    healthy = sum(when < onset for when in scrapes)
    return Recording(run, told, healthy, len(scrapes), series_of(found, scrapes))


@cache
def selectors() -> list[str]:
    """All that the rules ask the exporter for. What only the texts of alerts ask for is not among it."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return sorted({found for group in groups for rule in group["rules"] for found in SELECTOR.findall(rule["expr"])})


@cache
def labels_that_count() -> frozenset[str]:
    """The labels that any rule mentions; the rest (versions, process ids) would only make the files longer."""
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in RULES.glob("*.yml"))))
    return frozenset(words - {"__name__", "job", "instance", "run", "node", "name"})


def series_of(found: Iterable[Mapping[str, Any]], scrapes: Sequence[float]) -> Series:
    """Prometheus's answer by series and place. A restarted rank goes on in the series of its predecessor."""
    number = {when: n for n, when in enumerate(scrapes)}
    series: Series = defaultdict(lambda: defaultdict(lambda: [None] * len(scrapes)))
    for one in found:
        name, place = _name_and_place(one["metric"])
        for when, value in one["values"]:
            if when in number:
                series[name][place][number[when]] = float(value) - (scrapes[0] if is_timestamp(name) else 0.0)
    return {name: dict(places) for name, places in series.items()}


def _name_and_place(metric: Mapping[str, str]) -> tuple[str, str]:
    """A GPU's uuid follows from its index."""
    name = metric["__name__"]
    place = next((label for label in ("gpu", "rank") if name.startswith(f"rankscope_{label}_")), "")
    labels = {label: value for label, value in metric.items() if label in labels_that_count() - {place}}
    if place == "gpu":
        labels.pop("uuid", None)
    text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{text}}}", metric.get(place, "")
