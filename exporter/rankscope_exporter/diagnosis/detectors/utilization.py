"""Runs that do not use their GPUs.

- `low_utilization`: the run computes for at least `computing` of its time, but its GPUs are busy for at most `low_use`,
  on average and the median one (of two: the busier). One idle GPU has an alert of its own. The cause is `memory_bound`
  if more than `memory_bound` of their memory is used, `batch_too_small` if at most half is used: twice the batch fits.
- `cpu_fallback`: a rank has trained for `cpu_only` seconds while its GPU was idle, and less than `memory_held` of its
  memory is used. Its start-up does not count, nor a pause between steps: the GPU was idle in the whole window, which
  has steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median_high

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import RankReading

LOW, CPU = "low_utilization", "cpu_fallback"
TWICE = 0.5  # ratio of used memory up to which twice the batch fits
READING_AGE = 5.0  # seconds by which the reading of a GPU may be older than the rank's


def detect_low(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield a run that computes although its GPUs are idle for half of the time."""
    run, thresholds = window.run, window.thresholds
    busy = [ratio for one in run.ranks if (ratio := one.rate(one.spent.gpu.busy)) is not None]
    is_computing = window.lost.get("none", 0.0) >= thresholds.computing and run.steps > 0
    if not busy or max(fmean(busy), median_high(busy)) > thresholds.low_use or not is_computing:
        return
    full = [one.now.gpu.memory_ratio for one in run.ranks if one.now.gpu and one.now.gpu.memory_ratio is not None]
    memory = fmean(full) if full else None
    cause = "unknown"
    if memory is not None and memory > thresholds.memory_bound:
        cause = "memory_bound"
    elif memory is not None and memory <= TWICE:
        cause = "batch_too_small"
    evidence = {"busy": fmean(busy), "computing": window.lost["none"]} | ({} if memory is None else {"memory": memory})
    yield Candidate(LOW, 1.0 - fmean(busy), cause, evidence=evidence, needed=thresholds.tiers[-1].seconds)


def detect_cpu(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield ranks that make steps while their GPU is idle and its memory is empty."""
    for one in window.run.ranks:
        gpu = one.now.gpu
        if gpu is None or gpu.idle_seconds is None or gpu.memory_ratio is None or not one.spent.steps:
            continue
        if one.seconds > gpu.idle_seconds + READING_AGE:  # the steps may be older than its idle time
            continue
        if gpu.idle_seconds > window.thresholds.cpu_only / 2 and gpu.memory_ratio < window.thresholds.memory_held:
            steps = {"steps_per_second": one.spent.steps / one.seconds}
            lasted = min(gpu.idle_seconds, _trained_seconds(one.now))
            yield Candidate(
                CPU, 1.0, place=place(one.now), evidence=steps, lasted=lasted, needed=window.thresholds.cpu_only
            )


def _trained_seconds(rank: RankReading) -> float:
    spent = rank.counters.phases
    return sum(spent.values()) - spent.get("startup", 0.0)


DETECTORS = (
    StateDetector(
        LOW, detect_low, returns=True, needs_steps=True, explained_by=(CPU, "launch", "device_reads", "hang")
    ),
    StateDetector(CPU, detect_cpu, is_critical=True, returns=True, needs_steps=True, explained_by=("hang",)),
)
