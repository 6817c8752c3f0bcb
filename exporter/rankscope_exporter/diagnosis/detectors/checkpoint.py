"""Checkpoints that take too much of the run's time or are overdue.

- `slow_checkpoint`: time in checkpoints / span * (1 - 1 / n) is above `checkpoint`, with n checkpoints in the span. The
  factor corrects for the span starting or ending next to a checkpoint: n checkpoints have n - 1 intervals between them.
- `checkpoint_overdue`: no checkpoint for `checkpoint_overdue` seconds, counted from the first step if there was none. A
  notebook that has made no step for a quarter of that time has nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate

SLOW, OVERDUE = "slow_checkpoint", "checkpoint_overdue"


def detect_slow(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield checkpoints that take too much of the time."""
    if past.checkpoint_ratio > window.thresholds.checkpoint:
        yield Candidate(SLOW, past.checkpoint_ratio, lasted=0.0)


def detect_overdue(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield a checkpoint that is overdue."""
    run, thresholds = window.run, window.thresholds
    is_left = run.is_interactive and run.stalled > thresholds.checkpoint_overdue / 4
    if not run.ranks or not run.steps_rate or is_left:
        return
    began = min(one.now.began + one.now.counters.phases.get("startup", 0.0) for one in run.ranks)
    readings = (*(one.now for one in run.ranks), *run.ended)
    written = [one.last_checkpoint for one in readings if one.last_checkpoint is not None]
    at = max(one.now.at for one in run.ranks)
    age = at - max([began, *written])
    if age > thresholds.checkpoint_overdue / 2:
        cause = "overdue" if written else "never"
        yield Candidate(OVERDUE, 0.0, cause, evidence={"age": age}, lasted=age, needed=thresholds.checkpoint_overdue)


DETECTORS = (StateDetector(SLOW, detect_slow, returns=True), StateDetector(OVERDUE, detect_overdue, needs_steps=True))
