"""Interfaces of a collector: its description for the registry, and its metrics for a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration


class Described(Protocol):
    """Description of a collector in --help and docs/metrics.md, whether it runs or not."""

    @property
    def name(self) -> str:
        """Name of the file, the flag and the value of the label `collector`."""

    @property
    def help(self) -> str:
        """One line of `--help`."""

    @property
    def metrics(self) -> Sequence[Declaration]:
        """Declarations of the collector's metrics."""


class Collector(Protocol):
    """Source of metrics for a scrape. If `collect` raises, only this collector's metrics are missing."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
