"""What a collector is to those who ask it: the list of all there are, and a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration


class Described(Protocol):
    """What --help and docs/metrics.md say of a collector, whether it runs or not."""

    @property
    def name(self) -> str:
        """Of the file, the flag and the label's value."""

    @property
    def help(self) -> str:
        """What it collects, in one line of `--help`."""

    @property
    def metrics(self) -> Sequence[Declaration]:
        """Those of what it reads."""


class Collector(Protocol):
    """What a scrape asks. `collect` may raise: that costs this collector's metrics and nobody else's."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
