"""The waits of this machine's ranks for each other, step by step: transfer, skew and blame.

Also the reference step of each rank, which rules use to compare the ranks of several machines.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope.record.layout import COLLECTIVE_WAIT, OTHER, PHASES
from rankscope_exporter.diagnosis.readings import AlignedCounters
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.flags import flag
from rankscope_exporter.ranks.metric import rank_metrics
from rankscope_exporter.ranks.rank import Key, Scan
from rankscope_exporter.ranks.readings import aligned_counters
from rankscope_exporter.ranks.reference_step import Reference
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

_ROUNDING = 1e-6  # seconds; a step's phases are differences of sums over years


def _aligned(alignment: Alignment) -> Alignment | None:
    """Return the alignment; None if the rank has no aligned step."""
    return alignment if alignment.steps else None


def _reference(alignment: Alignment) -> Reference | None:
    return alignment.reference


def _reference_seconds(reference: Reference) -> Values:
    step = reference.step
    seconds = dict(zip(PHASES, step.phases, strict=True))
    own = step.seconds - sum(step.phases)
    seconds[PHASES[OTHER]] += own if own > _ROUNDING else 0.0
    return {phase: spent for phase, spent in seconds.items() if spent > 0.0 or phase == PHASES[COLLECTIVE_WAIT]}


ALIGNED = rank_metrics(_aligned)
REFERENCE = rank_metrics(_reference)
METRICS = (
    ALIGNED.counter(
        "aligned_steps_total",
        "Steps that were compared with the same step of all other ranks of the group (and pipeline stage) on this "
        "machine; absent for a rank that is alone here. Measured on the GPUs if their time is measured, else on the "
        "training threads. The next four metrics are for these steps.",
        lambda alignment: alignment.steps,
    ),
    ALIGNED.counter("aligned_step_seconds_total", "Length of these steps.", lambda alignment: alignment.seconds),
    ALIGNED.counter(
        "transfer_floor_seconds_total",
        "Least wait of any rank in each step, the same for the whole group. It is transfer, not a slow rank: high with "
        "low skew, the network is slow.",
        lambda alignment: alignment.floor,
    ),
    ALIGNED.counter(
        "skew_seconds_total",
        "Wait of this rank in each step beyond the transfer floor: for a rank that arrived later.",
        lambda alignment: alignment.skew,
    ),
    ALIGNED.counter(
        "blame_seconds_total",
        "Mean wait of the other ranks in steps in which this rank waited least, by the phase that took this rank "
        "longer than the others; `unknown` if no phase explains half. If all ranks have blame, they are late in turn.",
        lambda alignment: alignment.blame,
        "phase",
    ),
    REFERENCE.gauge(
        "reference_step",
        "Number of the last reference step, and the clock that measured it (`device` or `host`). Reference steps are "
        "chosen by their number and the mean step in the same way on all ranks: ranks with the same number show the "
        "same step, even on different machines. Absent for a rank that has ended, and if the GPU waits but is not "
        "measured.",
        lambda reference: {reference.clock: reference.step.number},
        "clock",
    ),
    REFERENCE.gauge(
        "reference_step_seconds",
        "Seconds of the reference step by phase, on the same clock. They sum to its length; the user's own phases are "
        "in `other`. Phases of 0 are absent, except `collective_wait`.",
        _reference_seconds,
        "phase",
    ),
)


def _interval(text: str) -> float:
    """Return the seconds, at least 1: ranks are read once a second. Raise ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 1 or more")
    return seconds


@dataclass(frozen=True, kw_only=True)
class AlignmentFlags:
    """The settings of the collector."""

    reference_interval: float = flag(
        "--collector.alignment.reference-interval",
        type=_interval,
        default=30.0,  # twice the scrape interval of deploy/prometheus
        metavar="SECONDS",
        help="mean time for which a rank shows its reference step, which compares ranks of several nodes: at least "
        "twice the scrape interval, and the same on all nodes (default: %(default)g)",
    )


class AlignedSteps:
    """The collector of the alignment."""

    name = "alignment"
    help = "training ranks step by step: transfer, skew and blame; reference steps"
    metrics = METRICS

    def __init__(self, reference_interval: float) -> None:
        self._alignment = StepAlignment(reference_interval)
        self._caches: dict[Key, SampleCache[Alignment]] = {}
        self.counters: Mapping[Key, AlignedCounters] = {}
        """The last poll's result by rank, for any thread: a poll replaces it and does not change it."""

    def poll(self, scan: Scan) -> list[Metric]:
        """Align the new steps."""
        found = self._alignment.take(scan.ranks)
        self.counters = {one.key: aligned_counters(one) for one in found}
        self._caches = {one.key: self._caches.get(one.key) or SampleCache(METRICS, one.key) for one in found}
        return families(METRICS, [self._caches[one.key].write(one) for one in found])
