"""What a detector of lost time is: it measures a loss in each part of a window, and explains it over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.thresholds import Thresholds

Losses = Mapping[str, float]
"""The run's GPU time by cause, as `lost.lost` returns it."""


class Window(NamedTuple):
    """What a detector reads."""

    run: RunFacts
    lost: Losses
    thresholds: Thresholds


class LossDetector(NamedTuple):
    """Pure functions of a window."""

    kind: str
    measure: Callable[[Window], Mapping[int | None, float]]
    """The loss by rank, or of the whole run (None). What is not known is absent."""
    explain: Callable[[Window, int | None], Candidate | None]
    """The cause, once the loss has lasted for the window. None if it is another detector's."""
    allowance: Callable[[Thresholds, int], float] | None = None
    """How much of it is no loss with so many ranks that are compared, where every healthy run has some."""


def place(one: RankFacts) -> Place:
    """Return where a rank is."""
    now = one.now
    return Place(now.rank, now.group, now.node, now.gpu.index if now.gpu else "", now.uuid)


def whole_run(value: float | None) -> Mapping[int | None, float]:
    """Return the loss of a whole run as `measure` does."""
    return {} if value is None else {None: value}


def usual(thresholds: Thresholds, _ranks: int) -> float:
    """Return the allowance of most causes."""
    return thresholds.allowance
