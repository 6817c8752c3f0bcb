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
