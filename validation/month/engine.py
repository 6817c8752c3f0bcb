"""The real rules in Prometheus' own engine (promtool): which alerts fire in a stretch of a run, and when."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

from deploy.prometheus import render
from testing import servers
from testing.promtool import ENVIRONMENT
from validation.month.record import SCRAPE
from validation.month.samples import Line

# promtool's complaint: the time of an expression, and what it had.
EVALUATION = re.compile(r"time: (\S+),")
FIRING = re.compile(r"\{([^{}]*alertname=[^{}]*)\}")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# promtool evaluates at the very moment of a scrape, and its 2.42 counts the samples at both ends of a range: one more
# than any Prometheus sees. So ranges of what is scraped are a second shorter.
RANGES = {"window": "44s", "long_window": "74s", "device_window": "299s"}
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
TOLD = ("rank", "cause", "phase", "severity", "gpu")

Labels = tuple[tuple[str, str], ...]


class Scrapes(Protocol):
    """What a Prometheus has of one run or node."""

    def __len__(self) -> int: ...

    @property
    def begin(self) -> float:
        """When the first scrape is, in seconds."""

    def has(self, names: set[str]) -> bool:
        """Whether one of these values of labels names it."""

    def lines(self) -> Iterator[Line]:
        """Return the series as promtool reads them."""


SomeScrapes = TypeVar("SomeScrapes", bound=Scrapes)


@dataclass(frozen=True)
class Firing:
    """An alert, from one evaluation to another without a break. Seconds of the run."""

    labels: Labels
    begins: float
    ends: float
    lasts: bool
    """Whether it fires when the stretch ends."""

    def line(self) -> dict[str, object]:
        """As it is written down."""
        labels = dict(self.labels)
        told = {name: labels[name] for name in TOLD if name in labels}
        return {"alert": labels["alertname"], **told, "begins": self.begins, "ends": self.ends, "lasts": self.lasts}


def rules(directory: Path) -> Path:
    """The shipped ones, as this engine has to have them."""
    ranges, path = directory / "ranges.yml", directory / "rules.yml"
    ranges.write_text(json.dumps(RANGES))
    path.write_text(render.group(render.Speed("15s", int(SCRAPE)), own=ranges))
    return path


def fire(stretches: Sequence[SomeScrapes], rules: Path, directory: Path) -> dict[SomeScrapes, list[Firing]]:
    """All that fires in these, as runs of one Prometheus. Raises RuntimeError if promtool does not understand."""
    interval = f"{int(SCRAPE)}s"
    asked = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{int(SCRAPE * number)}s", "exp_samples": []}
        for number in range(max(map(len, stretches)))
    ]
    lines = [line for stretch in stretches for line in stretch.lines()]
    test = {"interval": interval, "input_series": lines, "promql_expr_test": asked}
    document = {"rule_files": [str(rules)], "evaluation_interval": interval, "tests": [test]}
    path = directory / "test.json"
    path.write_text(json.dumps(document))
    command = [servers.program("promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    said = done.stdout + done.stderr
    if done.returncode and "got:" not in said:
        raise RuntimeError(f"promtool: {said[:2000]}")
    return _firings(stretches, _active(said))


def _active(said: str) -> dict[Labels, list[float]]:
    """By its labels, the times at which an alert fired."""
    found: dict[Labels, list[float]] = {}
    when = 0.0
    for text in said.splitlines():
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
    """Those within the stretch: a shorter one than others beside it has an end that is none."""
    last = SCRAPE * (len(stretch) - 1)
    times = [time for time in times if time <= last]
    found, begins = [], times[0] if times else 0.0
    for time, after in pairwise([*times, float("inf")]):
        if after - time > SCRAPE:
            found.append(Firing(labels, stretch.begin + begins, stretch.begin + time, time == last))
            begins = after
    return found
