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

from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, default_allowance, whole_run
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.lost import avoidable_throttling, device_waits

COPIES, LAUNCH, DEVICE_READS, THROTTLING = "copies", "launch", "device_reads", "throttling"
_LOST = {COPIES: "copies", LAUNCH: "launch", DEVICE_READS: "device_read", THROTTLING: "throttling"}


def _detector(kind: str) -> LossDetector:
    def measure(window: Window) -> Mapping[int | None, float]:
        if kind == COPIES and _copying(window) <= window.thresholds.loss / 2:
            return whole_run(0.0)
        return whole_run(window.lost.get(_LOST[kind], 0.0))

    def explain(window: Window, _rank: int | None) -> Candidate | None:
        ratio = window.lost.get(_LOST[kind], 0.0)
        is_present = kind not in _CONDITIONS or _CONDITIONS[kind](window)
        evidence = _EVIDENCE[kind](window) if kind in _EVIDENCE else {}
        return Candidate(kind, ratio, evidence=evidence) if is_present else None

    is_dry = kind in (LAUNCH, DEVICE_READS)
    explained_by = ("straggler",) if is_dry else ()
    by_cause = (("", ("straggler", "throttled")),) if kind == THROTTLING else ()
    return LossDetector(
        kind,
        measure,
        explain,
        default_allowance,
        is_on_device=is_dry,
        explained_by=explained_by,
        explained_by_cause=by_cause,
    )


def _copying(window: Window) -> float:
    """Return the median rank's time in copies, as a ratio."""
    return window.run.lower_median(lambda one: one.ratios.get("h2d_copy", 0.0)) or 0.0


_CONDITIONS: Mapping[str, Callable[[Window], bool]] = {
    COPIES: lambda window: _copying(window) > window.thresholds.loss,
    # Both leave the GPUs without work; the larger one is the cause.
    LAUNCH: lambda window: window.lost.get("launch", 0.0) >= window.lost.get("device_read", 0.0),
    DEVICE_READS: lambda window: window.lost.get("device_read", 0.0) > window.lost.get("launch", 0.0),
}


def _host_waits(window: Window) -> Mapping[str, float]:
    return {
        "host_wait": median(one.host_ratios.get("device_wait", 0.0) for one in window.run.ranks),
        "device_waits_per_step": device_waits(window.run),
    }


def _clocks(window: Window) -> Mapping[str, float]:
    known = [(throttled, clock) for throttled, clock in map(avoidable_throttling, window.run.ranks) if clock]
    return (
        {"throttled": fmean(ratio for ratio, _ in known), "clock": fmean(clock for _, clock in known)} if known else {}
    )


_EVIDENCE: Mapping[str, Callable[[Window], Mapping[str, float]]] = {
    LAUNCH: _host_waits,
    DEVICE_READS: _host_waits,
    THROTTLING: _clocks,
}
DETECTORS = tuple(map(_detector, (COPIES, LAUNCH, DEVICE_READS, THROTTLING)))
