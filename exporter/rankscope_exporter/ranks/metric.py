"""The tables of rank metrics: their prefix, labels, and access to a rank's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.ranks.rank import Rank

R = TypeVar("R")
Part = TypeVar("Part")

RANK_LABELS = ("run", "rank", "owner")
"""`owner` is the uid of the record's file, the only property of a record that cannot be forged. It is a number, because
names differ between nodes and containers. Two users' runs with the same name are two runs."""


def rank_metrics(part: Callable[[R], Part | None]) -> MetricTable[R, Part]:
    """Return a table of metrics `rankscope_rank_…`, whose values come from `part` of a rank."""
    return MetricTable("rankscope_rank_", RANK_LABELS, part)


RANK: MetricTable[Rank, Rank] = rank_metrics(whole)
"""The table of metrics from a rank's record."""


def nonzero(field_name: str) -> Callable[[Rank], float | None]:
    """Return the getter of a record's field. The value is absent while it is 0: the rank does not use it."""
    return lambda rank: rank.snapshot[field_name] or None
