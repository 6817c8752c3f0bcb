"""What a metric of a rank is: declared once, with how its values come out of the rank's record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope_exporter.exposition.metric import ReadMetric
from rankscope_exporter.exposition.sample_cache import Values, line_prefix
from rankscope_exporter.ranks.run_directory import Rank

RANK_LABELS = ("run", "rank", "owner")
"""`owner` is the uid of the record's file: the one thing about a record that nobody can make up. A number, because
names differ between nodes and containers. Two users' runs of one name are two runs."""


@dataclass(frozen=True)
class RankHistogram(ReadMetric[Rank]):
    """A distribution a rank. Its values are by the suffix of the name (`_bucket`, `_count`, `_sum`) and the bound."""

    def prefix(self, labels: Sequence[str]) -> str:
        """A bucket's bound stands in the label `le`."""
        *common, suffix, bound = labels
        bounds = [("le", bound)] if bound else []
        return line_prefix(self.name + suffix, (*zip(self.labels, common, strict=True), *bounds))


def gauge(name: str, text: str, values: Callable[[Rank], Values], *labels: str) -> ReadMetric[Rank]:
    """Declare `rankscope_rank_…`; `labels` are those besides RANK_LABELS."""
    return ReadMetric("gauge", f"rankscope_rank_{name}", text, (*RANK_LABELS, *labels), values=values)


def counter(name: str, text: str, values: Callable[[Rank], Values], *labels: str) -> ReadMetric[Rank]:
    """As `gauge`; the name ends in `_total`."""
    return ReadMetric("counter", f"rankscope_rank_{name}_total", text, (*RANK_LABELS, *labels), values=values)


def nonzero(field_name: str) -> Callable[[Rank], float | None]:
    """A field of the record; absent while it is 0, because then the rank has no such thing."""
    return lambda rank: rank.snapshot[field_name] or None
