"""What the ranks of this machine waited for each other, step by step: transfer, skew, and who was to blame.

And the reference step of each, by which rules compare the ranks of several machines likewise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope.record.layout import COLLECTIVE_WAIT, OTHER, PHASES
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.flags import flag
from rankscope_exporter.ranks.metric import rank_metrics
from rankscope_exporter.ranks.rank import Key, Scan
from rankscope_exporter.ranks.reference_step import Reference
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

_ROUNDING = 1e-6  # seconds: the phases of a step are differences of sums that have run for years


def _aligned(alignment: Alignment) -> Alignment | None:
    """None of a rank without a step that was aligned."""
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
        "Steps that could be compared with the same step of every other rank of the group (and of its stage of a "
        "pipeline) on this machine; absent for a rank that is alone here. Where the GPUs' time is measured it is by "
        "that, of the steps that were measured; else by the training threads'. The next four are of these steps.",
        lambda alignment: alignment.steps,
    ),
    ALIGNED.counter("aligned_step_seconds_total", "Length of these steps.", lambda alignment: alignment.seconds),
    ALIGNED.counter(
        "transfer_floor_seconds_total",
        "What in each step even the rank waited that waited least, the same for all of the group: transfer, not a "
        "rank. High with low skew is the network.",
        lambda alignment: alignment.floor,
    ),
    ALIGNED.counter(
        "skew_seconds_total",
        "What this rank waited in each step beyond that: for a rank that came later.",
        lambda alignment: alignment.skew,
    ),
    ALIGNED.counter(
        "blame_seconds_total",
        "What the others waited, on average, in the steps in which this rank waited least, by the phase that was "
        "longer in it than in the others; `unknown` where none explains half. Spread over the ranks it is a straggler "
        "that rotates.",
        lambda alignment: alignment.blame,
        "phase",
    ),
    REFERENCE.gauge(
        "reference_step",
        "Number of the last step that stands for the others, and the clock that it was measured by (`device` or "
        "`host`). Which steps these are follows from their number and the mean step, on all ranks alike: where the "
        "numbers of two ranks agree, on whatever machines, they show the same step. Absent for a rank that has ended, "
        "and where the GPU waits and is not measured.",
        lambda reference: {reference.clock: reference.step.number},
        "clock",
    ),
    REFERENCE.gauge(
        "reference_step_seconds",
        "That step's seconds by phase, by that clock; they sum to its length, the user's own phases are in `other`. "
        "But for `collective_wait`, phases of 0 are absent.",
        _reference_seconds,
        "phase",
    ),
)


def _interval(text: str) -> float:
    """Return the seconds. Ranks are read once a second, so no step can be shown for less. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 1 or more")
    return seconds


@dataclass(frozen=True, kw_only=True)
class AlignmentFlags:
    """The settings of the collector."""

    reference_interval: float = flag(
        "--collector.alignment.reference-interval",
        type=_interval,
        default=30.0,  # twice the scrape interval of deploy/prometheus
        metavar="SECONDS",
        help="how long a rank shows its reference step, by which ranks of several nodes are compared, on average: at "
        "least twice the scrape interval, and alike on all nodes (default: %(default)g)",
    )


class AlignedSteps:
    """What the alignment has found so far."""

    name = "alignment"
    help = "training ranks step by step: transfer, skew and blame; reference steps"
    metrics = METRICS

    def __init__(self, reference_interval: float) -> None:
        self._alignment = StepAlignment(reference_interval)
        self._caches: dict[Key, SampleCache[Alignment]] = {}
        self._found: Mapping[Key, Alignment] = {}

    def alignments(self) -> Mapping[Key, Alignment]:
        """Return what the last poll has found, by rank."""
        return self._found

    def poll(self, scan: Scan) -> list[Metric]:
        """Align what is new."""
        found = self._alignment.take(scan.ranks)
        self._found = {one.key: one for one in found}
        self._caches = {one.key: self._caches.get(one.key) or SampleCache(METRICS, one.key) for one in found}
        return families(METRICS, [self._caches[one.key].write(one) for one in found])
