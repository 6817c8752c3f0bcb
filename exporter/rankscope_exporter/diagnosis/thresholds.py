"""The limits of the diagnosis with their reasons, in seconds and ratios."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple


class Tier(NamedTuple):
    """A limit and the time for which the mean loss has to exceed it. Larger losses alert sooner.

    The method is that of multiple windows and burn rates (SRE workbook, "Alerting on SLOs").
    """

    limit: float
    seconds: float


@dataclass(frozen=True)
class Thresholds:
    """The limits. The defaults are for production."""

    tiers: tuple[Tier, ...] = (Tier(0.15, 7.0), Tier(0.10, 40.0), Tier(0.07, 900.0))
    """A loss of a sixth alerts within ten seconds: one rank's steps are 1.2 times as long."""
    chance: float = 1e-4
    """Probability of a loss by chance, up to which it alerts: six events of the same one of eight ranks, or fifteen of
    two. In shorter times than 100 s it is less, in proportion, since there are more of them."""
    release: float = 0.7
    """Ratio of the smallest limit below which a finding ends, so that a loss near its limit does not flap."""
    release_seconds: float = 20.0
    """How long the loss has to stay below `release`."""
    severe: float = 0.5
    """Loss above which a finding is critical."""
    cause: float = 0.3
    """Ratio of the lag that a phase has to explain to be the cause: with a slow CPU, forward has a third of the lag and
    backward two thirds."""
    single: float = 0.4
    """Ratio of the total wait that ranks which are always late have to explain, or ranks that are late in turn."""
    network_allowance: float = 0.25
    """Exposed transfer that is not counted as a loss. Well-tuned large jobs have up to a quarter."""
    bubble_allowance: float = 0.4
    """Pipeline bubble that is not counted as a loss. Four stages with four micro-batches have 43%, which is common."""
    step_deviation: float = 0.03
    """Random standard deviation of the ranks' steps, as a ratio. The wait for the last rank that follows from it is not
    counted as a loss: 0.03 with 2 ranks, 0.1 with 1,024 ranks."""
    uneven_allowance: float = 0.73
    """Wait for late ranks that is not counted as a loss if their work is uneven: of 100 published jobs, all but one
    would have less if their workers waited for each other in each mini-batch (Alibaba's GPU clusters, 2020)."""
    uneven_increase: float = 1.5
    """Multiple of a run's usual uneven work (nine tenths of the last hour are below it) that is not counted as a loss,
    if that is less than `uneven_allowance`. It is known after ten minutes, and ten steps. Three of those 100 jobs
    alert."""
    allowance: float = 0.03
    """The allowance of all other losses of a whole run. If the run's baseline is less, the baseline is used. The wait
    for late ranks counts if it is more than this ratio of the GPU time: one fast rank of 64 wastes less."""
    baseline_seconds: float = 3600.0
    """Time over which the baseline is the lower quartile. A fault becomes the baseline only after three quarters of it.
    Checkpoints are counted over this time, and over six times as long."""
    throttled: float = 0.3
    """Ratio of the time in which the GPU is throttled."""
    aggregation: float = 1.1
    """Rank 0's traffic or memory as a ratio of rank 1's. Healthy ranks differ by a few percent."""
    workers_busy: float = 0.5
    """Ratio of the time above which a loader worker computes: its CPU time and its wait for a CPU."""
    workers_idle: float = 0.2
    """The same ratio below which it waits for storage."""
    loader_busy: float = 0.8
    """Ratio of the time in which a loader worker makes batches, above which the loaders are too slow."""
    small_collective_bytes: float = 65536.0
    """Size up to which a collective takes as long as an empty one: its cost is latency only."""
    small_collectives_per_step: float = 3.0
    """Small collectives per step from which they are a loss. One or two are common (the loss, a gradient norm)."""
    latency_bound_bytes: float = 1e8
    """Bytes per second of exposed transfer up to which latency takes the time: a link of 1 Gbit/s carries more."""
    stuck_floor: float = 45.0
    """Shortest time without progress that is a hang. Healthy steps of a few seconds are far shorter. Twice that before
    a run has a pace, if it is known which rank the others wait for."""
    stuck: float = 300.0
    """The same if that is unknown, and in a checkpoint or evaluation. NCCL's watchdog acts after 600 s."""
    stuck_pace: float = 4.0
    """Multiple of the longest standstill in the last hour. A run that paused for 20 s may do so again for a bit
    longer."""
    pace_known_after: float = 300.0
    """Seconds of steps after which a run has a pace. Compilations for new shapes come early."""
    planned: float = 1800.0
    """Time without progress in the first checkpoint or evaluation, or a start-up. Compiling or loading a large model
    takes tens of minutes. A pause of all ranks outside of all phases may take twice as long."""
    idle: float = 0.02
    """Seconds of CPU or GPU per second up to which a rank in its start-up is idle. A rank that waits uses less than
    0.005. A download of a few megabytes per second uses more."""
    startup: float = 600.0
    """Seconds in start-up without a step. Studies of wasted allocations use ten minutes. Also the time for which ranks
    may wait for an idle rank before any has begun to train."""
    checkpoint: float = 0.05
    """Ratio of the time in checkpoints. At the rate that failures require, checkpoints take about 2%."""
    checkpoint_overdue: float = 14400.0
    """Seconds without a checkpoint."""
    low_use: float = 0.5
    """Ratio of the time in which a kernel runs. Published studies of underused GPUs use one half."""
    computing: float = 0.7
    """Ratio of useful work above which no other cause explains low use."""
    memory_bound: float = 0.8
    """Ratio of used memory above which a larger batch does not fit."""
    slower: float = 0.23
    """How much longer than in the run's past a step takes at the same work. Steps may vary by a fifth, and the mean of
    steps that are a quarter longer exceeds this."""
    slower_seconds: float = 600.0
    """How long the run has to be slower."""
    cpu_only: float = 60.0
    """Seconds without a kernel on the GPU of a rank that makes steps."""
    memory_held: float = 0.05
    """Ratio of used memory below which a GPU is empty. A bare CUDA context takes about 0.5 GB, less than 1%."""
    memory_retries: float = 10.0
    """Retries of a rank's allocator in ten minutes. Each waits for the GPU and allocates again what was cached: up to
    seconds. A few, as in the first long batch, cost less than an operator's look at them."""
    memory_full: float = 14400.0
    """Seconds until a rank's memory is full at its present growth, from which that alerts. Alerts of disks that fill up
    use four hours, too."""
    memory_share: float = 0.1
    """Ratio of the GPU's memory from which other processes, or unused memory of the allocator, are the reason that it
    runs out. Healthy allocators and CUDA contexts take a few percent."""
    amp_skips: float = 8.0
    """Skipped steps in five minutes. At the start, a scaler halves its scale about five times from 65536."""
    works_until_its_end: float = 60.0
    """Longest time between the last progress and the end: work after the last step."""

    @cached_property
    def loss(self) -> float:
        """The smallest loss that alerts. Healthy devices differ by about 2%."""
        return min(tier.limit for tier in self.tiers)

    def limit(self, seconds: float) -> float:
        """Return the limit of a loss that lasts for these seconds; infinite if it is too short for any."""
        return min((tier.limit for tier in self.tiers if tier.seconds <= seconds), default=inf)


def change_thresholds(thresholds: Thresholds, values: Any) -> Thresholds:
    """Return the thresholds with other values by name. Tiers are lists of a tier's fields, in their order.

    Raise ValueError that names the wrong value.
    """
    if not isinstance(values, dict):
        raise ValueError("not a JSON object of numbers by name")
    known = {one.name for one in fields(Thresholds)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"unknown threshold {unknown[0]!r}")
    return replace(thresholds, **{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    if name == "tiers":
        return _tiers(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)


def _tiers(rows: Any) -> tuple[Tier, ...]:
    width = len(Tier._fields)
    if not isinstance(rows, list) or not rows:
        raise ValueError("tiers must be a list of at least one tier")
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"a tier must be a list of {width} numbers: {', '.join(Tier._fields)}")
    return tuple(Tier(*(_value(name, number) for name, number in zip(Tier._fields, row, strict=True))) for row in rows)
