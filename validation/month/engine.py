"""Run the real rules in Prometheus' own engine (promtool): which alerts fire in a stretch of a run, and when."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

from deploy.prometheus import render
from deploy.prometheus.thresholds import Speed
from testing import rule_tests
from validation.month.record import SCRAPE
from validation.month.samples import Line

# promtool's output: the time of an expression, and its result.
EVALUATION = re.compile(r"time: (\S+),")
FIRING = re.compile(r"\{([^{}]*alertname=[^{}]*)\}")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# promtool evaluates at the time of a scrape, and version 2.42 includes the samples at both ends of a range: one more
# than a Prometheus sees. So ranges of scraped series are a second shorter.
RANGES = {"window": "44s", "long_window": "74s", "device_window": "299s"}
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
WRITTEN_LABELS = ("rank", "cause", "phase", "severity", "gpu")

Labels = tuple[tuple[str, str], ...]


class Scrapes(Protocol):
    """The samples of one run or node in a Prometheus."""

    def __len__(self) -> int: ...

    @property
    def begin(self) -> float:
        """The time of the first scrape in seconds."""

    def has(self, names: set[str]) -> bool:
        """Return whether one of these label values names it."""

    def lines(self) -> Iterator[Line]:
        """Yield the series in promtool's notation."""


SomeScrapes = TypeVar("SomeScrapes", bound=Scrapes)


@dataclass(frozen=True)
class Firing:
    """An alert that fires from one evaluation to another without a break. Seconds of the run."""

    labels: Labels
    begins: float
    ends: float
    lasts: bool
    """Whether it still fires at the end of the stretch."""

    def line(self) -> dict[str, object]:
        """Return the alert as the ledger has it."""
        labels = dict(self.labels)
        written = {name: labels[name] for name in WRITTEN_LABELS if name in labels}
        return {"alert": labels["alertname"], **written, "begins": self.begins, "ends": self.ends, "lasts": self.lasts}


def rules(directory: Path) -> Path:
    """Return the shipped rules, adapted to this engine."""
    ranges, path = directory / "ranges.yml", directory / "rules.yml"
    ranges.write_text(json.dumps(RANGES))
    path.write_text(render.group(Speed("15s", int(SCRAPE)), own=ranges))
    return path


def fire(stretches: Sequence[SomeScrapes], rules: Path, directory: Path) -> dict[SomeScrapes, list[Firing]]:
    """Return all alerts in these stretches, as runs of one Prometheus. Raises RuntimeError if promtool fails."""
    interval = f"{int(SCRAPE)}s"
    # Not the alert about the number of the others: the stretches are runs of one owner at the same time.
    firing = 'ALERTS{alertstate="firing",alertname!="RankscopeManyAlerts"}'
    asked = [
        {"expr": firing, "eval_time": f"{int(SCRAPE * number)}s", "exp_samples": []}
        for number in range(max(map(len, stretches)))
    ]
    lines = [line for stretch in stretches for line in stretch.lines()]
    test = {"interval": interval, "input_series": lines, "promql_expr_test": asked}
    document = {"rule_files": [str(rules)], "evaluation_interval": interval, "tests": [test]}
    path = directory / "test.json"
    path.write_text(json.dumps(document))
    found = rule_tests.answer(path, rules)
    if not found.holds and "got:" not in found.output:
        raise RuntimeError(f"promtool: {found.output[:2000]}")
    return _firings(stretches, _active(found.output))


def _active(output: str) -> dict[Labels, list[float]]:
    """Return the times at which each alert fired, by its labels."""
    found: dict[Labels, list[float]] = {}
    when = 0.0
    for text in output.splitlines():
        if time := EVALUATION.search(text):
            when = sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([hms])", time.group(1)))
        for one in FIRING.findall(text):
            labels = tuple(sorted(pair for pair in LABEL.findall(one) if pair[0] not in ("__name__", "alertstate")))
            found.setdefault(labels, []).append(when)
    return found


def _firings(stretches: Sequence[SomeScrapes], active: dict[Labels, list[float]]) -> dict[SomeScrapes, list[Firing]]:
    found: dict[SomeScrapes, list[Firing]] = {stretch: [] for stretch in stretches}
    for labels, times in active.items():
        by_name = dict(labels)
        names = {by_name[name] for name in ("run", "instance", "node") if name in by_name}
        stretch = next(one for one in stretches if one.has(names))
        found[stretch] += _intervals(stretch, labels, sorted(set(times)))
    return {stretch: sorted(firings, key=lambda one: one.begins) for stretch, firings in found.items()}


def _intervals(stretch: Scrapes, labels: Labels, times: list[float]) -> list[Firing]:
    """Return the intervals within the stretch: in a test with longer ones, a short stretch has an artificial end."""
    last = SCRAPE * (len(stretch) - 1)
    times = [time for time in times if time <= last]
    found, begins = [], times[0] if times else 0.0
    for time, after in pairwise([*times, float("inf")]):
        if after - time > SCRAPE:
            found.append(Firing(labels, stretch.begin + begins, stretch.begin + time, time == last))
            begins = after
    return found
