"""The type of loss detectors: they measure a loss in each part of a window and explain it over the whole window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

Losses = Mapping[str, float]
"""The run's GPU time by cause, as `lost.lost` returns it."""

KindAndCause = tuple[str, str]


class Window(NamedTuple):
    """The input of a detector."""

    run: RunFacts
    lost: Losses
    thresholds: Thresholds
    is_onset: bool = False
    """True if the loss began while the run was already watched."""


class LossDetector(NamedTuple):
    """A loss detector: pure functions of a window."""

    kind: str
    measure: Callable[[Window], Mapping[Any, float]]
    """Returns the loss of the whole run (key None), or what the loss of sets of ranks follows from, by rank. An unknown
    value is absent."""
    explain: Callable[[Window, Any], Candidate | None]
    """Gets the ranks of a set, or None. Returns the cause after the loss has lasted for the window; None if it belongs
    to another detector."""
    allowance: Callable[[Window], float] | None = None
    """Returns the part that a healthy run has as well, from the newest part of the run; it is not counted as a loss."""
    is_compared: bool = False
    """True if it is measured in the compared steps, which may be few."""
    has_rivals: bool = False
    """True if one of the ranks that are compared has the largest loss in each step, maybe by chance."""
    explained_by: tuple[str, ...] = ()
    """The kinds of findings that explain this loss. Each is explained by a state in which the run makes no progress."""
    explained_by_cause: tuple[tuple[str, KindAndCause], ...] = ()
    """Its causes with the kind and cause that explain them. An empty cause stands for any cause."""
    is_on_device: bool = False
    """True if only the device's clock shows it. Then it is unknown in a part without a measured step."""


def place(now: RankReading) -> Place:
    """Return the place of a rank."""
    return Place(now.rank, now.group, now.node, now.gpu.index if now.gpu else "", now.uuid)


def whole_run(value: float | None) -> Mapping[int | None, float]:
    """Return the loss of a whole run as `measure` does."""
    return {} if value is None else {None: value}


def default_allowance(window: Window) -> float:
    """Return the allowance of most detectors."""
    return window.thresholds.allowance
