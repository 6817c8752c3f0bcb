"""A run that has been in start-up for more than `startup` seconds and has not made a step."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate

KIND = "slow_startup"


def detect(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield the start-up after half of the time allowed for it."""
    starting = [one for one in window.run.ranks if one.now.phase == "startup" and not one.now.counters.steps]
    lasted = max((one.now.at - one.now.phase_since for one in starting), default=0.0)
    if lasted > window.thresholds.startup / 2:
        ranks = {"ranks_starting": float(len(starting))}
        yield Candidate(KIND, 1.0, evidence=ranks, lasted=lasted, needed=window.thresholds.startup)


DETECTOR = StateDetector((KIND,), detect, explained_by=("loss_scale_collapse", "hang"))
