"""The type of state detectors. A state is present or absent, and is a finding after it has lasted long enough.

A candidate has to last for `needed` seconds since it was first seen, or by its own `lasted` if it has one. Its ratio is
the GPU time that is lost: 1 if no useful work is done, 0 if the state itself costs no time (its texts have no {ratio}).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from rankscope_exporter.diagnosis.detectors.loss import Detector, Window
from rankscope_exporter.diagnosis.findings import Candidate, Pending
from rankscope_exporter.diagnosis.memory import MemoryTrend
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.speed import Slower
from rankscope_exporter.diagnosis.standstill import Standstill


@dataclass(frozen=True)
class Past:
    """The run's history before the window. Times are in seconds; None if unknown."""

    standstill: Standstill | None = None
    """The present standstill, if no rank makes progress."""
    pace: Mapping[str, float] = field(default_factory=dict)
    """The seconds after which such a standstill is a hang, by what the run waits for, as far as its pace is known."""
    shortest_limit: float | None = None
    """The same of all standstills, once the run has a pace."""
    checkpoint_ratio: float = 0.0
    """Time in checkpoints as a ratio; see history.py."""
    highest_amp_scale: float = 0.0
    """The highest loss scale in the last five minutes."""
    amp_skips: float = 0.0
    """Steps that were skipped in the last five minutes."""
    idle: Mapping[int, float] = field(default_factory=dict)
    """How long each rank has been idle; see activity.py."""
    memory: Mapping[int, MemoryTrend] = field(default_factory=dict)
    """How the memory of each living rank has changed; see memory.py."""
    alive: Mapping[int, RankReading] = field(default_factory=dict)
    """Each rank's last reading while it was alive."""
    slower: Slower | None = None
    """How much slower the run is than it was; see speed.py."""


@dataclass(frozen=True)
class StateDetector(Detector):
    """A state detector: a pure function of a window and the run's history."""

    detect: Callable[[Window, Past], Iterator[Candidate]]
    is_critical: bool = False
    """True if its findings are critical from the start; otherwise they are warnings."""
    stops_run: bool = False
    """True if the run makes no progress in this state. It ends at once."""
    returns: bool = False
    """True if it is the same finding when it comes again in the same processes."""
    ends_late: float = 0.0
    """The longest time by which it ends after its cause, as a ratio of the time that it has to last. It is explained
    for so long after the end of the finding that explained it."""
    needs_steps: bool = False
    """True if only a window with steps shows it. All others are seen at the first reading."""
    undecided: Callable[[Window, Collection[Candidate]], Iterator[Pending]] | None = None
    """Yields what looks like this state and is none, by the window and the candidates."""
