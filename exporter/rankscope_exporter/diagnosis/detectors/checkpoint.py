"""Checkpoints: too much of the time, or too long ago. Before the first one the time counts from the first step on.

Between n checkpoints lie n - 1 intervals, which the span holds at least: so (1 - 1 / n) of the time in them is no more
than their part of the run's time, however they fall into the span (history.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate

SLOW, OVERDUE = "slow_checkpoint", "checkpoint_overdue"


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield either."""
    run, thresholds = window.run, window.thresholds
    if past.checkpoint_ratio > thresholds.checkpoint:
        yield Candidate(SLOW, past.checkpoint_ratio, lasted=0.0)
    if not run.ranks or not run.steps_rate:
        return
    began = min(one.now.began + one.now.counters.phases.get("startup", 0.0) for one in run.ranks)
    written = [one.now.last_checkpoint for one in run.ranks if one.now.last_checkpoint is not None]
    written += [reading.last_checkpoint for reading in run.ended if reading.last_checkpoint is not None]
    at = max(one.now.at for one in run.ranks)
    age = at - max([began, *written])
    if age > thresholds.checkpoint_overdue / 2:
        cause = "overdue" if written else "never"
        yield Candidate(OVERDUE, 0.0, cause, evidence={"age": age}, lasted=age, needed=thresholds.checkpoint_overdue)


DETECTOR = StateDetector((SLOW, OVERDUE), detect)
