"""What a detector of a state is: something that holds or does not, and for how long it has to before it is a finding.

A candidate's `needed` is counted from when it was first seen, or it says itself in `lasted` how long it has held. Its
ratio is GPU time that is lost: 1 where nothing useful is done, 0 where a state costs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.findings import Candidate


@dataclass(frozen=True)
class Past:
    """What is remembered of the run from before the window. Seconds; None where nothing is known yet."""

    longest_pause: float | None = None
    """Without progress outside of planned phases, in the last hour."""
    longest_planned_pauses: Mapping[str, float] = field(default_factory=dict)
    """By planned phase, in the last six hours."""
    checkpoint_ratio: float = 0.0
    """Time in checkpoints. See history.py."""
    highest_amp_scale: float = 0.0
    """In the last five minutes."""
    amp_skips: float = 0.0
    """In the same time."""


class StateDetector(NamedTuple):
    """A pure function of a window and what is remembered, and the kinds that it yields."""

    kinds: tuple[str, ...]
    detect: Callable[[Window, Past], Iterator[Candidate]]
    is_critical: bool = False
    """Whether its findings are critical from the start; else they are warnings."""
