"""A recorded run of the gauntlet from Prometheus, as a small file.

A line has one series of one rank or GPU, or of several if they are equal. Counters and timestamps have their first
value, then the differences; all others have values. `x3` repeats a value three times, `_` is a scrape without a sample.
Times are seconds since the first scrape.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from math import floor, log10
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tests/rules/recorded"

Values = list[float | None]
"""One for each scrape; None where the series was absent."""
Series = dict[str, dict[str, Values]]
"""Values by metric (with the labels other than its place), then by rank or GPU."""


def is_counter(name: str) -> bool:
    """Return whether the series only grows while its process lives."""
    return name.partition("{")[0].endswith(("_total", "_bucket"))


def is_timestamp(name: str) -> bool:
    """Return whether the series' values are times."""
    return name.partition("{")[0].endswith("_timestamp_seconds")


@dataclass(frozen=True)
class Recording:
    """One run: its series, and the expected alert at the fast speed."""

    run: str
    """The run's name in the ledger."""
    expected: dict[str, str]
    """The labels that an alert must have; empty for a decoy."""
    healthy: int
    """Scrapes before the fault."""
    scrapes: int
    series: Series

    @property
    def case(self) -> str:
        """The name of the fault or decoy."""
        return self.run.partition("/")[0]

    def write(self, directory: Path = RECORDED) -> None:
        """Write a file with the name of the case."""
        lines = {name: dict(_lines(name, places)) for name, places in sorted(self.series.items())}
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**asdict(self), "series": lines}, indent=1)
        (directory / f"{self.case}.json").write_text(text + "\n")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Values are rounded; all else is as written."""
        fields = json.loads(path.read_text())
        fields["series"] = {
            name: {place: _decoded(name, text) for places, text in lines.items() for place in places.split(" ")}
            for name, lines in fields["series"].items()
        }
        return cls(**fields)


def _lines(name: str, places: dict[str, Values]) -> Iterator[tuple[str, str]]:
    places_by_text = defaultdict(list)
    for place, values in sorted(places.items()):
        places_by_text[_encoded(name, values)].append(place)
    return ((" ".join(places), text) for text, places in places_by_text.items())


def _encoded(name: str, values: Values) -> str:
    rounded = [None if value is None else round(value, _decimals(name, values)) for value in values]
    if is_counter(name) or is_timestamp(name):
        rounded = _differences(rounded, _decimals(name, values))
    words = ("_" if value is None else f"{value:.12g}" for value in rounded)
    return " ".join(word + (f"x{n}" if (n := len(list(run))) > 1 else "") for word, run in groupby(words))


def _decimals(name: str, values: Values) -> int:
    """Return the digits: two of a counter's growth a scrape, or hundredths; tenths of a time; four of a gauge."""
    known = [value for value in values if value is not None]
    if is_timestamp(name):
        return 1
    if is_counter(name):
        growth = (max(known) - min(known)) / len(known)
        return min(2, 1 - floor(log10(growth))) if growth else 2
    size = max(map(abs, known))
    return 3 - floor(log10(size)) if size else 0


def _differences(values: Values, decimals: int) -> Values:
    before = [None, *values[:-1]]
    return [
        value if value is None or last is None else round(value - last, decimals)
        for last, value in zip(before, values, strict=True)
    ]


def _decoded(name: str, text: str) -> Values:
    values: Values = []
    for word in text.split(" "):
        value, _, times = word.partition("x")
        for _ in range(int(times or 1)):
            last = values[-1] if values and (is_counter(name) or is_timestamp(name)) else None
            values.append(None if value == "_" else float(value) + (last or 0.0))
    return values
