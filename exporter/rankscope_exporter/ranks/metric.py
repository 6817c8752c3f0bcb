"""The tables of ranks' metrics: their prefix and labels, and how values come out of a rank's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.ranks.rank import Rank

R = TypeVar("R")
Part = TypeVar("Part")

RANK_LABELS = ("run", "rank", "owner")
"""`owner` is the uid of the record's file: the one thing about a record that nobody can make up. A number, because
names differ between nodes and containers. Two users' runs of one name are two runs."""


def rank_metrics(part: Callable[[R], Part | None]) -> MetricTable[R, Part]:
    """A table of `rankscope_rank_…`, of what `part` takes out of whatever is read of a rank."""
    return MetricTable("rankscope_rank_", RANK_LABELS, part)


RANK: MetricTable[Rank, Rank] = rank_metrics(whole)
"""Of a rank's record."""


def nonzero(field_name: str) -> Callable[[Rank], float | None]:
    """A field of the record; absent while it is 0, because then the rank has no such thing."""
    return lambda rank: rank.snapshot[field_name] or None
