"""A metric, declared once: collectors emit from the declaration, and docs/metrics.md is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankscope_exporter.families import CounterMetricFamily, GaugeMetricFamily

Family = GaugeMetricFamily | CounterMetricFamily
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

    def family(self) -> Family:
        """An empty one, to be filled with values."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(self.name, self.help, labels=self.labels)
