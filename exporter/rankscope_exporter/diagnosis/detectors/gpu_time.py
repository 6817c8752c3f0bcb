"""Losses of the whole run that the time by cause names already: copies, launches, device reads, throttling.

- `copies`: the middle of the ranks waits for copies from the host to the GPU
- `launch`: GPUs have done all that was issued, while their hosts issue more
- `device_reads`: GPUs have done all that was issued, because their hosts waited for a value of them in every step
- `throttling`: what the work took longer than at the highest clock, while the clocks were held down
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, median

from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, usual, whole_run
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.lost import device_waits, throttling

COPIES, LAUNCH, DEVICE_READS, THROTTLING = "copies", "launch", "device_reads", "throttling"
_LOST = {COPIES: "copies", LAUNCH: "launch", DEVICE_READS: "device_read", THROTTLING: "throttling"}


def _detector(kind: str) -> LossDetector:
    def measure(window: Window) -> Mapping[int | None, float]:
        return whole_run(window.lost.get(_LOST[kind], 0.0))

    def explain(window: Window, _rank: int | None) -> Candidate | None:
        ratio = window.lost.get(_LOST[kind], 0.0)
        is_this = kind not in _IS_THIS or _IS_THIS[kind](window)
        return (
            Candidate(kind, ratio, evidence=_EVIDENCE[kind](window) if kind in _EVIDENCE else {}) if is_this else None
        )

    return LossDetector(kind, measure, explain, usual)


def _is_copying(window: Window) -> bool:
    middle = window.run.middle(lambda one: one.ratios.get("h2d_copy", 0.0))
    return (middle or 0.0) > window.thresholds.loss


_IS_THIS: Mapping[str, Callable[[Window], bool]] = {
    COPIES: _is_copying,
    # Both leave GPUs without work: the larger one is the cause.
    LAUNCH: lambda window: window.lost.get("launch", 0.0) >= window.lost.get("device_read", 0.0),
    DEVICE_READS: lambda window: window.lost.get("device_read", 0.0) > window.lost.get("launch", 0.0),
}


def _host_waits(window: Window) -> Mapping[str, float]:
    return {
        "host_wait": median(one.host_ratios.get("device_wait", 0.0) for one in window.run.ranks),
        "device_waits_per_step": device_waits(window.run),
    }


def _clocks(window: Window) -> Mapping[str, float]:
    known = [(throttled, clock) for throttled, clock in map(throttling, window.run.ranks) if clock]
    return (
        {"throttled": fmean(ratio for ratio, _ in known), "clock": fmean(clock for _, clock in known)} if known else {}
    )


_EVIDENCE: Mapping[str, Callable[[Window], Mapping[str, float]]] = {
    LAUNCH: _host_waits,
    DEVICE_READS: _host_waits,
    THROTTLING: _clocks,
}
DETECTORS = tuple(map(_detector, (COPIES, LAUNCH, DEVICE_READS, THROTTLING)))
