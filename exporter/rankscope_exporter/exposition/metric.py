"""A metric, declared once: collectors emit from the declaration, and docs/metrics.md is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rankscope_exporter.exposition.sample_cache import Values, WrittenFamily, line_prefix, number_text

R = TypeVar("R")

UNITS = ("seconds", "bytes", "watts", "joules", "hertz", "celsius")


@dataclass(frozen=True)
class Declaration:
    """What is true of a metric whatever its values are."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """As on /metrics: a counter's ends in `_total`."""
    help: str
    """What it says, in a sentence or two: the HELP line and the reference's text."""
    labels: tuple[str, ...] = ()
    source: str = ""
    """The call or the fact that it is read from, where the text does not say."""
    since: str = "any"
    """The first GPU architecture that has it, by NVIDIA's documentation of the call."""

    @property
    def unit(self) -> str:
        """The base unit, which the name ends with; 1 for counts, states and infos."""
        stem = self.name.removesuffix("_total")
        if stem.endswith("_bytes_per_second"):
            return "bytes per second"
        return next((unit for unit in UNITS if stem.endswith(f"_{unit}")), "1")

    def prefix(self, labels: Sequence[str]) -> str:
        """A line up to its value. Raises ValueError unless there is a value for each label."""
        return line_prefix(self.name, tuple(zip(self.labels, labels, strict=True)))

    def family(self, values: Values) -> WrittenFamily:
        """These values, as a family that is written anew each time: for the few that are not worth remembering."""
        several: Mapping[Any, float | None] = values if isinstance(values, Mapping) else {(): values}
        lines = (
            f"{self.prefix((labels,) if isinstance(labels, str) else labels)}{number_text(number)}\n".encode()
            for labels, number in several.items()
            if number is not None
        )
        return WrittenFamily(self, lines)


@dataclass(frozen=True)
class ReadMetric(Declaration, Generic[R]):
    """A metric, and how its values come out of a reading."""

    values: Callable[[R], Values] = field(kw_only=True)
