"""One module for each cause of lost time. LOSSES are measured in every part of a window; STATES hold or do not."""

from __future__ import annotations

from rankscope_exporter.diagnosis.detectors import (
    checkpoint,
    crash,
    data,
    gpu_time,
    hang,
    loss_scale,
    network,
    rotating,
    small_collectives,
    startup,
    straggler,
    utilization,
)
from rankscope_exporter.diagnosis.detectors.loss import LossDetector
from rankscope_exporter.diagnosis.detectors.state import StateDetector

LOSSES: tuple[LossDetector, ...] = (
    straggler.DETECTOR,
    rotating.DETECTOR,
    data.DETECTOR,
    network.DETECTOR,
    small_collectives.DETECTOR,
    *gpu_time.DETECTORS,
)
STATES: tuple[StateDetector, ...] = (
    hang.detect,
    crash.detect,
    startup.detect,
    checkpoint.detect,
    utilization.detect_low,
    utilization.detect_cpu,
    loss_scale.detect,
)
