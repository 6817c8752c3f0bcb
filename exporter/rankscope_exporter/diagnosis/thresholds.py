"""Every limit of the diagnosis, with its reason. Seconds and ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple


class Tier(NamedTuple):
    """How much has to be lost for how long: larger losses alert sooner.

    The method is that of multiple windows and burn rates (SRE workbook, "Alerting on SLOs"). The mean over the span is
    above the limit, and no more than the ratio `dips` of its parts are below half of the limit, so that what happened
    once is no loss of each step.
    """

    limit: float
    seconds: float
    steps: int
    parts: int
    """Into how many the span is divided at least."""
    dips: float


@dataclass(frozen=True)
class Thresholds:
    """The limits. The defaults are those of production."""

    tiers: tuple[Tier, ...] = (
        Tier(0.15, 8.0, 12, 8, 0.13),
        Tier(0.10, 40.0, 24, 8, 0.2),
        Tier(0.10, 120.0, 40, 12, 0.4),
        Tier(0.07, 900.0, 60, 30, 0.4),
    )
    """A loss of a sixth, that of a rank with steps 1.2 times as long, within ten seconds. Below twelve steps nothing is
    known: where batches differ by a third, the mean of twelve steps is uncertain by a tenth."""
    loss: float = 0.07
    """The least loss that alerts. Drift between healthy devices is some 2 %."""
    release: float = 0.7
    """Ratio of `loss` below which a finding ends: a loss near its limit comes and goes."""
    release_seconds: float = 20.0
    """For how long it has to be below that."""
    severe: float = 0.5
    """From this loss on a finding is critical."""
    severe_dips: float = 0.5
    """Ratio of the parts of the shortest span that may be below `severe` when a finding becomes critical."""
    cause: float = 0.3
    """A phase is the cause if it explains this ratio of the lag: a slow CPU divides it 1 : 2 between forward and
    backward."""
    single: float = 0.5
    """A rank is the straggler if it explains this ratio of what all wait: ranks that are late in turn do not."""
    rotating: float = 0.75
    """Below this ratio of what all wait no single rank explains it."""
    spike: float = 4.0
    """The 99th percentile of the step time over its median: the histogram's bounds are up to 2.5 apart."""
    spike_seconds: float = 300.0
    """For how long one rank has to be the straggler where few steps are far longer than the rest: chance may choose the
    same rank for a minute."""
    network_allowance: float = 0.25
    """Exposed transfer that is no loss: well-tuned large jobs lose up to a quarter."""
    bubble_allowance: float = 0.4
    """The bubble of a pipeline that is no loss: four stages with four micro-batches have 43 %, which is common."""
    step_deviation: float = 0.03
    """Standard deviation of the ranks' steps, as a ratio, that is chance. What ranks wait for the last of them by that
    is no loss: 0.02 of two ranks, 0.1 of 1,024."""
    allowance: float = 0.03
    """The same of every other cause of a run. Where the run's baseline is less, that is the allowance."""
    baseline_seconds: float = 3600.0
    """The baseline is the lower quartile over this long: a fault does not become the baseline before three quarters of
    it have passed."""
    throttled: float = 0.3
    """Ratio of the time that the clocks are held down."""
    throttled_clock: float = 0.95
    """Ratio of the highest mean clock of the group below which a throttled GPU is slower than its peers."""
    aggregation: float = 1.1
    """Rank 0's traffic or memory over that of rank 1. Healthy ones differ by some percent."""
    workers_busy: float = 0.5
    """CPU time of a loader worker, and time that it waited for a CPU, from which on it computes."""
    workers_idle: float = 0.2
    """The same, below which it waits for storage."""
    loader_busy: float = 0.8
    """Ratio of the time that a loader worker makes batches from which on the loaders are too slow for the run."""
    small_collective_bytes: float = 65536.0
    """A smaller collective takes as long as an empty one: latency is all it costs."""
    small_collectives_per_step: float = 3.0
    """One or two are common (the loss, a gradient norm)."""
    latency_bound_bytes: float = 1e8
    """Bytes a second of exposed transfer: less than a link of 1 Gbit/s carries, so it is not the bytes that take the
    time."""
    device_reads_per_step: float = 0.9
    """Waits of the host for the device from which on it waits in every step. The edges of a window make the ratio
    uncertain."""
    stuck_floor: float = 45.0
    """Without progress of any rank: no healthy step of a few seconds takes that long."""
    stuck_early: float = 90.0
    """The same before a run has a pace, if ranks differ in the collectives that they have issued."""
    stuck: float = 300.0
    """The longest time without progress outside of planned phases: NCCL's watchdog ends the job after ten minutes."""
    stuck_pace: float = 4.0
    """Times the longest pause of the last hour: a run that paused for 20 s may do so again, for somewhat longer."""
    pace_known_after: float = 300.0
    """Seconds of steps after which the longest pause is the run's pace: compilation for new shapes comes early."""
    pace_seconds: float = 3600.0
    planned_pace_seconds: float = 21600.0
    """The same of checkpoints and evaluations, which are rare."""
    planned: float = 1800.0
    """Without progress in a planned phase: compiling or loading a large model takes tens of minutes."""
    startup: float = 600.0
    """The studies of wasted allocations count ten minutes."""
    checkpoint: float = 0.05
    """Ratio of the time: checkpoints as often as failures require cost some 2 %."""
    checkpoint_seconds: float = 3600.0
    checkpoint_long_seconds: float = 21600.0
    checkpoint_overdue: float = 14400.0
    low_use: float = 0.5
    """Ratio of the time that a kernel runs. The published studies of underused GPUs draw the line at a half."""
    low_use_seconds: float = 900.0
    computing: float = 0.7
    """Useful work from which on low use is not explained by another cause."""
    memory_bound: float = 0.8
    """Memory in use from which on a larger batch does not fit."""
    memory_spare: float = 0.5
    """Memory in use up to which twice the batch fits."""
    cpu_only: float = 60.0
    """Without a kernel on the GPU of a rank that makes steps."""
    memory_held: float = 0.05
    """A bare CUDA context takes about half a GB, below 1 % of the memory; 5 % is data."""
    amp_skips: float = 8.0
    """Skipped steps in `amp_seconds`: when it begins, a scaler halves some five times from 65536."""
    amp_seconds: float = 300.0
    ends_together: float = 5.0
    """Between the first and the last rank of a run that ended: exporters notice an end within a second."""
    works_until_its_end: float = 60.0
    """Without progress before the end: time for what follows the last step."""


def changed(thresholds: Thresholds, values: Mapping[str, Any]) -> Thresholds:
    """Return the thresholds with other values by name. Tiers are lists of a tier's fields, in their order.

    Raises ValueError that names what is wrong.
    """
    known = {one.name for one in fields(Thresholds)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"no threshold is named {unknown[0]!r}")
    return replace(thresholds, **{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    if name == "tiers":
        return _tiers(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r} and not a number from 0 on")
    return float(value)


def _tiers(rows: Any) -> tuple[Tier, ...]:
    width = len(Tier._fields)
    if not isinstance(rows, list) or len(rows) < 2:
        raise ValueError("tiers is not a list of two or more")
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"a tier is not a list of {width} numbers: {', '.join(Tier._fields)}")
    return tuple(Tier(*(_value(name, number) for name, number in zip(Tier._fields, row, strict=True))) for row in rows)
