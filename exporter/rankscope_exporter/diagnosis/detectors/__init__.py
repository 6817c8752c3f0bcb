"""The detectors, one module each. LOSSES are measured in every part of a window; STATES are present or absent."""

from __future__ import annotations

from rankscope_exporter.diagnosis.detectors import (
    checkpoint,
    crash,
    data,
    gpu_time,
    hang,
    late,
    loss_scale,
    network,
    pipeline,
    slowdown,
    small_collectives,
    startup,
    utilization,
)
from rankscope_exporter.diagnosis.detectors.loss import LossDetector
from rankscope_exporter.diagnosis.detectors.state import StateDetector
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.parts import Key

LOSSES: tuple[LossDetector, ...] = (
    *late.DETECTORS,
    data.DETECTOR,
    network.DETECTOR,
    small_collectives.DETECTOR,
    *pipeline.DETECTORS,
    *gpu_time.DETECTORS,
)
STATES: tuple[StateDetector, ...] = (
    hang.DETECTOR,
    crash.DETECTOR,
    startup.DETECTOR,
    checkpoint.DETECTOR,
    slowdown.DETECTOR,
    *utilization.DETECTORS,
    loss_scale.DETECTOR,
)
KINDS = (
    *(one.kind for one in LOSSES),
    *(kind for one in STATES for kind in one.kinds),
)
"""All kinds of findings."""
ONE_PER_RUN = {
    *(one.kind for one in LOSSES if one.is_one_per_run),
    *(kind for one in STATES if one.is_one_per_run for kind in one.kinds),
}
"""Kinds of which a run has at most one finding, although it may name ranks."""


def key_of(candidate: Candidate) -> Key:
    """Return the key that stays the same while the candidate lasts."""
    place = candidate.place
    return candidate.kind, None if candidate.kind in ONE_PER_RUN else place.ranks or place.rank
