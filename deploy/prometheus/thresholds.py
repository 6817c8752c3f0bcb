"""The thresholds of the rules: their values at each scrape interval, and durations as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Speed:
    """Rules for scrapes and evaluations each `interval` seconds."""

    name: str
    """Name of the rendered file."""
    interval: int
    is_fast: bool = False
    """Rules for the demo and the tests, where ranks share two CPUs and waits are short."""

    @classmethod
    def each(cls, interval: str) -> Speed:
        """Return the speed with an interval such as `30s`. Raises RenderError."""
        if not re.fullmatch(r"[1-9]\d*[smh]", interval):
            raise RenderError(f"--interval: {interval} is not a duration in whole seconds such as 30s or 1m")
        return cls(interval, int(seconds(interval)))


SPEEDS = (Speed("15s", 15), Speed("5s", 5), Speed("fast", 1, is_fast=True))

Threshold = Mapping[str, Any]


class RenderError(Exception):
    """The sources or the thresholds are wrong; the text says where."""


@dataclass(frozen=True)
class Thresholds:
    """The content of thresholds.yml."""

    named: Mapping[str, Threshold]
    tiers: tuple[Mapping[str, Threshold], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Thresholds:
        """Load a file. Raises RenderError for an invalid threshold."""
        named: dict[str, Any] = yaml.safe_load(path.read_text())
        tiers = named.pop("tiers", {"rows": []})["rows"]
        for name, fields in [*named.items(), *(field for row in tiers for field in row.items())]:
            _check(f"{path.name}: {name}", fields)
        return cls(named, tuple(tiers))

    def replaced(self, path: Path) -> Thresholds:
        """Return them with an operator's own, as `name: value` or with fields. Raises RenderError."""
        try:
            own: object = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RenderError(f"{path}: {error}") from None
        if not isinstance(own, dict):
            raise RenderError(f"{path}: expected a table of thresholds such as checkpoint_overdue: 1h")
        fields = {name: _own(one) for name, one in own.items()}
        for name, one in fields.items():
            if name not in self.named:
                raise RenderError(f"{path}: {name} is not a threshold of thresholds.yml")
            _check(f"{path}: {name}", one)
            if (kind := _kind(self.named[name])) != _kind(one):
                raise RenderError(f"{path}: {name} needs {kind}")
        return replace(self, named={**self.named, **fields})


def _own(fields: object) -> Threshold:
    """Return the fields of an operator's threshold, which needs no reason."""
    return {"reason": "", **fields} if isinstance(fields, dict) else {"reason": "", "value": fields}


def _kind(fields: Threshold) -> str:
    """Return the kind of value that the threshold needs."""
    value = fields.get("value", "1s")
    if isinstance(value, str):
        return "a duration such as 90s or 5m" if DURATION.fullmatch(value) else "a text"
    return "a number"


def _check(where: str, fields: Threshold) -> None:
    """Check the names of a threshold's fields. Raises RenderError."""
    for allowed in ({"value"}, {"scrapes"}, {"scrapes", "at_least"}, {"evaluations", "at_least"}):
        if set(fields) in (allowed | {"reason"}, allowed | {"reason", "fast", "why_fast"}):
            return
    raise RenderError(
        f"{where} needs value, scrapes or evaluations, a reason, and may have at_least, and fast with why_fast; "
        f"it has {', '.join(sorted(fields))}"
    )


def value_of(fields: Threshold, speed: Speed) -> str:
    """Return the threshold at a speed; a number of scrapes becomes a duration."""
    if speed.is_fast and "fast" in fields:
        return str(fields["fast"])
    if "value" in fields:
        return str(fields["value"])
    intervals = fields.get("scrapes") or fields["evaluations"] - 1
    span = intervals * speed.interval + ("evaluations" in fields)  # one second more includes the one at the edge
    return duration(max(span, float(seconds(fields.get("at_least", "0s")))))


def duration(span: float) -> str:
    """Return seconds as a Prometheus duration, in the largest unit that divides them."""
    return next(f"{span / size:g}{unit}" for unit, size in reversed(SECONDS.items()) if span % size == 0)


def seconds(duration: str) -> str:
    """Return a duration such as `90s` or `5m` as a number of seconds. Raises ValueError."""
    match = DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration} is not a duration such as 90s or 5m")
    return f"{int(match[1]) * SECONDS[match[2]]:g}"


def percent(ratio: str) -> str:
    """Return a ratio such as `0.1` as a percentage."""
    return f"{float(ratio) * 100:g}%"


def readable(duration: str) -> str:
    """Return a duration such as `5m` in words: `5 min`. Raises ValueError."""
    number, unit = duration[:-1], duration[-1]
    seconds(duration)
    return f"{number} {'min' if unit == 'm' else unit}"


FORMS: dict[str | None, Callable[[str], str]] = {
    None: str,
    "seconds": seconds,
    "percent": percent,
    "readable": readable,
}
"""The forms in which a placeholder shows a threshold, by name."""
