"""What a run's GPU time goes to, in parts that sum to one: `none` is useful work, everything else is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.thresholds import Thresholds

DATA = ("data", "data_cpu", "data_io")
Parts = defaultdict[str, float]

_NAMES = {"h2d_copy": "copies"}
"""Causes of phases that are not named as the phase is."""


def lost(run: RunFacts, thresholds: Thresholds, *, is_stuck: bool = False) -> Mapping[str, float]:
    """Return the ratio of the run's GPU time by cause. Empty if nothing is known of any rank.

    Allocated are the GPUs of the living ranks, and those of ranks that have ended while others live.
    """
    if not run.ranks:
        return {}
    idle = len({reading.rank for reading in run.ended} - {one.rank for one in run.ranks})
    allocated = len(run.ranks) + idle
    parts: Parts = defaultdict(float, idle=idle / allocated)
    if is_stuck:
        stall = {"stall": len(run.ranks) / allocated}
        return stall | {"idle": idle / allocated} if idle else stall
    moving: Parts = defaultdict(float)
    for one in run.ranks:
        total = sum(one.ratios.values()) or 1.0
        for phase, ratio in one.ratios.items():
            moving[phase] += ratio / total / allocated
    parts["transfer"] = min(_transfer(run) / allocated, moving[WAIT])
    parts["straggler"] = moving[WAIT] - parts["transfer"]
    reads, launches = _dry(run, moving, thresholds)
    parts |= {"device_read": sum(reads.values()), "launch": sum(launches.values())}
    computing = sum(moving[phase] - reads[phase] - launches[phase] for phase in phases.COMPUTING)
    throttled = computing * _throttled(run)
    parts |= {"throttling": throttled, "none": computing - throttled}
    for phase, ratio in moving.items():
        if phase not in (*phases.COMPUTING, WAIT):
            cause = _data_cause(run, thresholds) if phase == "data_wait" else _NAMES.get(phase, phase)
            parts[cause] += ratio - reads[phase]
    return {cause: ratio for cause, ratio in parts.items() if ratio > 0.0}


def _transfer(run: RunFacts) -> float:
    """Return what even the rank waits that waits least, summed over the ranks: by single steps where they are known."""
    waited = 0.0
    for members in run.groups.values():
        least = min(one.ratios.get(WAIT, 0.0) for one in members)
        for one in members:
            aligned = one.spent.aligned
            waits = aligned.wait_floor + aligned.skew
            waited += one.ratios.get(WAIT, 0.0) * aligned.wait_floor / waits if waits > 0.0 else least
    return waited


def _dry(run: RunFacts, moving: Parts, thresholds: Thresholds) -> tuple[Parts, Parts]:
    """Return by phase for how much of the time devices had nothing to do: after reads of a value, and for launches.

    It is so for all ranks or for none, so the middle of the ranks is taken. Had the host not waited for the device, a
    step would take as long as the longer of what the host issues and what the device computes: so much is lost to reads
    as both wait, the host for the device and the device for the host. The rest is a host that is slow.
    """
    reads: Parts = defaultdict(float)
    launches: Parts = defaultdict(float)
    measured = [one for one in run.ranks if one.device_scale]
    if not measured:
        return reads, launches
    share = len(measured) / len(run.ranks)
    dry = {
        phase: min(median(one.spent.device_dry.get(phase, 0.0) * one.device_scale for one in measured) * share, ratio)
        for phase, ratio in moving.items()
        if phase in phases.ISSUING
    }
    if (total := sum(dry.values())) <= 0.0:
        return reads, launches
    overlap = min(median(one.host_ratios.get("device_wait", 0.0) for one in measured) / total, 1.0)
    if device_waits(run) >= thresholds.device_reads_per_step:
        reads |= {phase: ratio * overlap for phase, ratio in dry.items()}
    launches |= {phase: ratio * (1.0 - overlap) for phase, ratio in dry.items() if phase in phases.COMPUTING}
    return reads, launches


def device_waits(run: RunFacts) -> float:
    """Return how often a step the host waits for the device, in the middle of the ranks."""
    stepping = [one.spent for one in run.ranks if one.spent.steps]
    return median(spent.device_waits / spent.steps for spent in stepping) if stepping else 0.0


def _throttled(run: RunFacts) -> float:
    """Return by what ratio the computation is longer than at the highest clock, because clocks are held down."""
    known = [throttled * (1.0 - clock) for one in run.ranks for throttled, clock in [throttling(one)] if clock]
    return fmean(known) if known else 0.0


def throttling(one: RankFacts) -> tuple[float, float | None]:
    """Return for which ratio of the time a rank's GPU was throttled, and its mean clock as a ratio of the maximum."""
    gpu = one.spent.gpu
    clock = one.rate(gpu.clock_ratio_seconds)
    longest = max((gpu.throttled or {}).values(), default=0.0)
    return min(longest / one.seconds, 1.0), clock if clock is None else min(clock, 1.0)


def _data_cause(run: RunFacts, thresholds: Thresholds) -> str:
    """Return why data is late: loader workers compute, or they wait for storage, or that is not known."""
    busy = workers_busy(run.ranks)
    if busy is None:
        return "data"
    if busy > thresholds.workers_busy:
        return "data_cpu"
    return "data_io" if busy < thresholds.workers_idle else "data"


def workers_busy(ranks: tuple[RankFacts, ...]) -> float | None:
    """Return for how much of the time a loader worker computes, or would if it had a CPU. None without workers."""
    sums: dict[str, float] = defaultdict(float)
    for one in ranks:
        process = one.spent.process
        if one.now.children and process.workers_cpu is not None:
            sums["used"] += (process.workers_cpu + (process.workers_run_queue or 0.0)) / one.seconds
            sums["workers"] += one.now.children
    return sums["used"] / sums["workers"] if sums["workers"] else None


def loader_busy(one: RankFacts) -> float | None:
    """Return for how much of the time a loader worker of this rank makes batches. None where that is not known."""
    working, idle = one.spent.loader_working, one.spent.loader_idle
    if working is None or idle is None or working + idle <= 0.0:
        return None
    return working / (working + idle)
