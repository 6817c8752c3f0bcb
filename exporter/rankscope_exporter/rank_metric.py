"""What a metric of a rank is: declared once, with how its values come out of the rank's record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rankscope_exporter.families import HistogramMetricFamily
from rankscope_exporter.metric import Declaration, Family
from rankscope_exporter.run_directory import Key, Rank

RANK_LABELS = ("run", "rank")

Values = float | Mapping[Any, float] | None
"""One for the rank, or by the value (str) or values (tuple of str) of what labels the metric has besides RANK_LABELS;
None is absent."""


class OfRank(Protocol):
    """A rank as its record shows it, or what else is known of it."""

    @property
    def key(self) -> Key:
        """The values of RANK_LABELS."""


Subject = TypeVar("Subject", bound=OfRank)


@dataclass(frozen=True)
class RankMetric(Declaration, Generic[Subject]):
    """A metric with RANK_LABELS first."""

    value: Callable[[Subject], Values] = field(kw_only=True)

    def of(self, ranks: Iterable[Subject]) -> Family:
        """The family of all ranks."""
        family = self.family()
        for rank in ranks:
            value = self.value(rank)
            if isinstance(value, Mapping):
                for labels, number in value.items():
                    more = (labels,) if isinstance(labels, str) else labels
                    family.add_metric((*rank.key, *more), number)
            elif value is not None:
                family.add_metric(rank.key, value)
        return family


Buckets = list[tuple[str, float]]


@dataclass(frozen=True)
class RankHistogram(Declaration):
    """A distribution a rank; `value` gives the cumulated buckets and the sum."""

    value: Callable[[Rank], tuple[Buckets, float]] = field(kw_only=True)

    def of(self, ranks: Iterable[Rank]) -> HistogramMetricFamily:
        """The family of all ranks."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for rank in ranks:
            family.add_metric(rank.key, *self.value(rank))
        return family


def gauge(name: str, text: str, value: Callable[[Rank], Values], *labels: str) -> RankMetric[Rank]:
    """Declare `rankscope_rank_…`; `labels` are those besides RANK_LABELS."""
    return RankMetric("gauge", f"rankscope_rank_{name}", text, (*RANK_LABELS, *labels), value=value)


def counter(name: str, text: str, value: Callable[[Rank], Values], *labels: str) -> RankMetric[Rank]:
    """As `gauge`; the name ends in `_total`."""
    return RankMetric("counter", f"rankscope_rank_{name}_total", text, (*RANK_LABELS, *labels), value=value)


def nonzero(field_name: str) -> Callable[[Rank], float | None]:
    """A field of the record; absent while it is 0, because then the rank has no such thing."""
    return lambda rank: rank.snapshot[field_name] or None
