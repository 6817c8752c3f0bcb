"""The type of loss detectors: they measure a loss in each part of a window and explain it over the whole window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.late_set import Ranks
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


@dataclass(frozen=True)
class Detector:
    """A detector of one kind of finding."""

    kind: str
    _: KW_ONLY
    is_one_per_run: bool = False
    """True if a run has at most one finding of this kind, although it may name ranks."""
    explained_by: tuple[str, ...] = ()
    """The kinds of findings that explain it. A loss is also explained by a state in which the run makes no progress."""
    explained_by_cause: tuple[tuple[str, KindAndCause], ...] = ()
    """Its causes with the kind and cause that explain them. An empty cause stands for any cause."""


@dataclass(frozen=True)
class LossDetector(Detector):
    """A loss detector: pure functions of a window."""

    measure: Callable[[Window], float | Mapping[int, float] | None]
    """Returns the loss of the whole run, or what the loss of sets of ranks follows from, by rank; None if it is
    unknown."""
    explain: Callable[[Window, Ranks], Candidate | None]
    """Gets the ranks of a set, or none. Returns the cause after the loss has lasted for the window; None if it belongs
    to another detector."""
    allowance: Callable[[Window], float] | None = None
    """Returns the part that a healthy run has as well, from the newest part of the run; it is not counted as a loss."""
    is_compared: bool = False
    """True if it is measured in the compared steps, which may be few."""
    sets: Callable[[RunFacts, Thresholds, Collection[int]], Iterator[Ranks]] | None = None
    """Yields the sets of ranks that are late in a window, without known ones. Then `measure` returns the waits of
    ranks, of which one waits least in each step, maybe by chance. Exactly one detector has it."""
    less: str = ""
    """The kind of the sets whose loss is not part of this one."""
    is_usual: Callable[[Candidate], bool] | None = None
    """Returns whether a candidate is no fault by itself: only if it is larger than in most runs, or in this one."""
    unusual_in: tuple[str, ...] = ()
    """The kinds of findings during which this loss is not usual."""
    is_contradicted: Callable[[Candidate, Candidate, Window], bool] | None = None
    """Returns whether the cause of an open finding is over, by its candidate, the newest one and the window."""
    is_on_device: bool = False
    """True if only the device's clock shows it. Then it is unknown in a part without a measured step."""


def place(now: RankReading) -> Place:
    """Return the place of a rank."""
    return Place(now.rank, now.group, now.node, now.gpu.index if now.gpu else "", now.uuid)


def default_allowance(window: Window) -> float:
    """Return the allowance of most detectors."""
    return window.thresholds.allowance
