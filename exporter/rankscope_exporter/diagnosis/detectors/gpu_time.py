"""Losses of the whole run that are read from its lost time by cause (`lost.py`).

- `copies`: the median rank waits for copies from the host to the GPU (with up to three ranks: each of them, and at the
  same time)
- `launch`: the GPUs run out of work, because the hosts launch kernels too slowly
- `device_reads`: the GPUs run out of work, because the hosts read a value from them in every step and wait for it
- `throttling`: the extra time that the work takes compared with the highest clock, while the GPUs are throttled. Power
  at the default limit does not count: there, every GPU at full load has lower clocks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, default_allowance
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.late_set import Ranks
from rankscope_exporter.diagnosis.lost import avoidable_throttling, device_waits

COPIES, LAUNCH, DEVICE_READS, THROTTLING = "copies", "launch", "device_reads", "throttling"
Evidence = Mapping[str, float]


def _detector(
    kind: str,
    cause: str,
    *,
    is_present: Callable[[Window], bool] = lambda _: True,
    evidence: Callable[[Window], Evidence] = lambda _: {},
    **declared: Any,
) -> LossDetector:
    """Return the detector of a cause of lost time."""

    def measure(window: Window) -> float:
        is_of_one_rank = kind == COPIES and _copying(window) <= window.thresholds.loss / 2
        return 0.0 if is_of_one_rank else window.lost.get(cause, 0.0)

    def explain(window: Window, _ranks: Ranks) -> Candidate | None:
        return Candidate(kind, measure(window), evidence=evidence(window)) if is_present(window) else None

    return LossDetector(kind, measure, explain, default_allowance, **declared)


def _copying(window: Window) -> float:
    """Return the median rank's time in copies, as a ratio."""
    return window.run.lower_median(lambda one: one.ratios.get("h2d_copy", 0.0)) or 0.0


def _host_waits(window: Window) -> Evidence:
    waits = median(one.host_ratios.get("device_wait", 0.0) for one in window.run.ranks)
    return {"host_wait": waits, "device_waits_per_step": device_waits(window.run)}


def _clocks(window: Window) -> Evidence:
    known = [(throttled, clock) for throttled, clock in map(avoidable_throttling, window.run.ranks) if clock]
    names = ("throttled", "clock") if known else ()
    return dict(zip(names, map(fmean, zip(*known, strict=True)), strict=True))


def _is_launch_larger(window: Window) -> bool:
    """Return whether slow launches are the cause: both they and reads leave the GPUs without work."""
    return window.lost.get("launch", 0.0) >= window.lost.get("device_read", 0.0)


_ON_DEVICE: Mapping[str, Any] = {"evidence": _host_waits, "is_on_device": True, "explained_by": ("straggler",)}
DETECTORS = (
    _detector(COPIES, "copies", is_present=lambda window: _copying(window) > window.thresholds.loss),
    _detector(LAUNCH, "launch", is_present=_is_launch_larger, **_ON_DEVICE),
    _detector(DEVICE_READS, "device_read", is_present=lambda window: not _is_launch_larger(window), **_ON_DEVICE),
    _detector(THROTTLING, "throttling", evidence=_clocks, explained_by_cause=(("", ("straggler", "throttled")),)),
)
