"""A run that has been in start-up for more than `startup` seconds and has not made a step.

A run without a backward pass does not train if a rank has had events for as long: it evaluates a model, or serves it.
Nor is it slow while its ranks have events, at least one in half of that time.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "slow_startup"


def detect(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield the start-up after half of the time allowed for it."""
    run, limit = window.run, window.thresholds.startup
    starting = [one for one in run.ranks if one.now.phase == "startup" and not one.now.counters.steps]
    lasted = max((one.now.at - one.now.phase_since for one in starting), default=0.0)
    is_silent = run.stalled > limit / 2 or _makes_passes(run)
    if lasted > limit / 2 and is_silent and is_training(run, window.thresholds):
        ranks = {"ranks_starting": float(len(starting))}
        yield Candidate(KIND, 1.0, evidence=ranks, lasted=lasted, needed=limit)


def is_training(run: RunFacts, thresholds: Thresholds) -> bool:
    """Return whether the run trains, or may begin to."""
    events = max((one.now.last_progress - one.now.began for one in run.ranks), default=0.0)
    return _makes_passes(run) or events < thresholds.startup


def _makes_passes(run: RunFacts) -> bool:
    return any(one.now.counters.iterations or one.now.counters.micro_steps for one in run.ranks)


DETECTORS = (StateDetector(KIND, detect, explained_by=("loss_scale_collapse", "hang")),)
