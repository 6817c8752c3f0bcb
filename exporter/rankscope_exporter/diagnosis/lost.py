"""A run's GPU time by cause, as ratios that sum to one: `none` is useful work, everything else is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis.facts import DEVICE, HOST, WAIT, RankFacts, RunFacts, lower_median, unplanned
from rankscope_exporter.diagnosis.thresholds import Thresholds

DATA = ("data", "data_cpu", "data_io")
Parts = defaultdict[str, float]

_WITHOUT_KERNELS = ("data_wait", "h2d_copy", "startup")
_POWER_CAP = "sw_power_cap"
_NAMES = {"h2d_copy": "copies"}
"""Causes by phase, where their names differ."""
_ON_HOST = {"device_wait": "unknown"}
"""On the host's clock also these: nothing shows what the device does while the host waits for it."""


def by_cause(seconds: Mapping[str, float], stalled: float = 0.0) -> Mapping[str, float]:
    """Return seconds by phase as seconds by cause. For ranks without facts: waits are not divided further.

    The last `stalled` seconds are stall, with the same part of each phase.
    """
    causes: Parts = defaultdict(float)
    whole = sum(seconds.values())
    stall = min(stalled / whole, 1.0) if whole > 0.0 else 0.0
    if stall:
        causes["stall"] = stall * whole
    names = {**dict.fromkeys(phases.COMPUTING, "none"), "data_wait": "data", **_NAMES, **_ON_HOST}
    for phase, spent in seconds.items():
        if spent > 0.0:
            causes[names.get(phase, phase)] += spent * (1.0 - stall)
    return causes


def lost(run: RunFacts, thresholds: Thresholds, *, is_stuck: bool = False) -> Mapping[str, float]:
    """Return the ratio of the run's GPU time by cause. Empty without a living rank.

    The allocated GPUs are those of the living ranks, and of ranks that have ended while others are alive.
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
            moving[_ON_HOST.get(phase, phase) if one.clock == HOST else phase] += ratio / total / allocated
    planned = _waits_for_planned_phase(run)
    for_planned = min(sum(planned.values()) / allocated, moving[WAIT])
    parts |= _waiting(run, planned, moving[WAIT] - for_planned, allocated)
    reads, launches = _dry(run, moving)
    parts |= {"device_read": sum(reads.values()), "launch": sum(launches.values())}
    computing = sum(moving[phase] - reads[phase] - launches[phase] for phase in phases.COMPUTING)
    throttled = computing * _throttled(run)
    parts |= {"throttling": throttled, "none": computing - throttled}
    for phase, ratio in moving.items():
        if phase not in (*phases.COMPUTING, WAIT):
            cause = _data_cause(run, thresholds) if phase == "data_wait" else _NAMES.get(phase, phase)
            parts[cause] += ratio - reads[phase]
    parts[_longest_planned_phase(run)] += for_planned
    return {cause: ratio for cause, ratio in parts.items() if ratio > 0.0}


def _waits_for_planned_phase(run: RunFacts) -> Mapping[int, float]:
    """Return by rank its wait for the rank that is in planned phases longest, such as rank 0 in a checkpoint."""
    longest = max(one.planned_ratio for one in run.ranks)
    return {one.rank: min(one.ratios.get(WAIT, 0.0), longest - one.planned_ratio) for one in run.ranks}


def _longest_planned_phase(run: RunFacts) -> str:
    """Return the phase in which a rank is longest."""
    longest = max(run.ranks, key=lambda one: one.planned_ratio)
    return max(phases.PLANNED, key=lambda phase: longest.host_ratios.get(phase, 0.0))


def _waiting(run: RunFacts, planned: Mapping[int, float], waited: float, allocated: int) -> Mapping[str, float]:
    """Divide the ranks' wait into that for late ranks, for other stages, and transfer: the least wait of any rank.

    In a pipeline, the least wait is the bubble first, up to the size that the schedule explains.
    """
    floor = min(_floor(run, planned) / allocated, waited)
    if not run.stages:
        return {"transfer": floor, "straggler": waited - floor}
    least = min(min(shortest_wait(members) for members in run.stages.values()) * len(run.ranks) / allocated, floor)
    bubble = min(expected_bubble(run) * len(run.ranks) / allocated, least)
    imbalance = min(mean_stage_wait(run) * len(run.ranks) / allocated, floor - least)
    late = waited - least - imbalance
    return {"transfer": least - bubble, "bubble": bubble, "stage_imbalance": imbalance, "straggler": late}


def _floor(run: RunFacts, planned: Mapping[int, float]) -> float:
    """Return the least wait of any peer, summed over the ranks; step by step where steps were compared.

    `planned` is each rank's wait for a planned phase, whose steps are not compared.
    """
    waited = 0.0
    for members in run.peers.values():
        own = {one.rank: one.ratios.get(WAIT, 0.0) - planned[one.rank] for one in members}
        for one in members:
            aligned = one.spent.aligned
            # The wait in a step that is not over yet may be for a late rank. A single step may have begun long before.
            if aligned.seconds > 0.0 and (one.clock == DEVICE or aligned.steps > 1.0):
                in_steps = sum(unplanned(one.ratios).values()) / aligned.seconds
                waited += min(aligned.wait_floor * in_steps, own[one.rank])
            else:
                waited += min(own.values())
    return waited


def shortest_wait(members: Sequence[RankFacts]) -> float:
    """Return the least wait of any rank."""
    return min(one.ratios.get(WAIT, 0.0) for one in members)


def stage_waits(run: RunFacts) -> Mapping[int, float]:
    """Return by stage the longest wait of any of its ranks, without waits for a planned phase.

    That rank has the least work. A rank that is slow within its stage does not count.
    """
    planned = _waits_for_planned_phase(run)
    return {
        stage: max(one.ratios.get(WAIT, 0.0) - planned[one.rank] for one in members)
        for stage, members in run.stages.items()
    }


def mean_stage_wait(run: RunFacts) -> float:
    """Return the ranks' mean wait for a stage with more work, whose ranks all wait less than the others."""
    waits = stage_waits(run)
    least = min(waits.values(), default=0.0)
    ranks = sum(len(members) for members in run.stages.values())
    return sum((waits[stage] - least) * len(members) for stage, members in run.stages.items()) / ranks if ranks else 0.0


def expected_bubble(run: RunFacts) -> float:
    """Return the ratio of the time that a stage is idle: (p - 1) / (m + p - 1) with p stages and m micro-batches.

    This holds for GPipe and 1F1B (Narayanan et al., SC'21); other schedules have less. Return 0 without a pipeline, and
    1 if the number of micro-batches is unknown.
    """
    stages = len(run.stages)
    if stages < 2:
        return 0.0
    batches = micro_batches(run)
    return 1.0 if batches is None else (stages - 1.0) / (batches + stages - 1.0)


def micro_batches(run: RunFacts) -> float | None:
    """Return the micro-batches per step: backward passes of one rank. None if none are counted.

    Counted since the start of the rank, because a window of a few steps may contain the passes of one step less.
    """
    counted = [one.now.counters for one in run.ranks]
    ratios = [each.micro_steps / each.iterations for each in counted if each.iterations and each.micro_steps]
    batches = median(ratios) if ratios else inf
    return float(round(batches)) if isfinite(batches) else None


def _dry(run: RunFacts, moving: Parts) -> tuple[Parts, Parts]:
    """Return the ratio of the time by phase in which devices were dry: because of device reads, and of launches.

    All ranks are affected alike, so the median rank is used; of two or three ranks the least, for one of them may be
    late. If the host never waited for the device, a step would take the longer of the host's issue time and the
    device's compute time. The loss to reads is therefore the time in which both wait: the host for the device, and the
    device for the host. The rest is lost to a slow host (launches), as far as the host's issue time exceeds the
    device's compute time.

    The device clock counts a whole phase as dry, also if the device computes most of it and only keeps up with the
    host. The GPU's busy time bounds that.
    """
    reads: Parts = defaultdict(float)
    launches: Parts = defaultdict(float)
    measured = [one for one in run.ranks if one.device_scale]
    if not measured:
        return reads, launches
    share = len(measured) / len(run.ranks)
    dry = {
        phase: min(
            lower_median([one.spent.device_dry.get(phase, 0.0) * one.device_scale for one in measured]) * share, ratio
        )
        for phase, ratio in moving.items()
        if phase in phases.ISSUING
    }
    issued = sum(median(one.host_ratios.get(phase, 0.0) for one in measured) for phase in phases.COMPUTING) * share
    computing = sum(moving[phase] for phase in phases.COMPUTING)
    if (computed := _computed(measured, moving, computing)) is not None:
        idle = max(computing - computed, 0.0)
        in_phases = sum(dry.get(phase, 0.0) for phase in phases.COMPUTING)
        if in_phases > idle:
            dry |= {phase: dry[phase] * idle / in_phases for phase in phases.COMPUTING if phase in dry}
    if (total := sum(dry.values())) <= 0.0:
        return reads, launches
    overlap = min(median(one.host_ratios.get("device_wait", 0.0) for one in measured) / total, 1.0)
    if _reads_in_each_step(run):
        reads |= {phase: ratio * overlap for phase, ratio in dry.items()}
    launches |= {phase: ratio * (1.0 - overlap) for phase, ratio in dry.items() if phase in phases.COMPUTING}
    slow = sum(launches.values())
    if computed is not None and slow > (excess := max(issued - computed, 0.0)):
        launches |= {phase: ratio * excess / slow for phase, ratio in launches.items()}
    return reads, launches


def _computed(measured: Sequence[RankFacts], moving: Parts, computing: float) -> float | None:
    """Return the least ratio of the time in which the GPUs computed; None if it is unknown.

    In the other phases, kernels may have run all the time, such as those of collectives, except while data is late.
    """
    busy = [ratio for one in measured if (ratio := one.rate(one.spent.gpu.busy)) is not None]
    if not busy:
        return None
    without = sum(moving[phase] for phase in _WITHOUT_KERNELS)
    return max(min(median(busy), 1.0) - max(1.0 - computing - without, 0.0), 0.0)


def _reads_in_each_step(run: RunFacts) -> bool:
    """Return whether the host waits for the device in each step. At the edges of a window a wait may be missing."""
    return device_waits(run) * run.steps >= max(run.steps - 1.0, 1.0)


def device_waits(run: RunFacts) -> float:
    """Return how often per step the host waits for the device: the median over the ranks."""
    stepping = [one.spent for one in run.ranks if one.spent.iterations]
    return median(spent.device_waits / spent.iterations for spent in stepping) if stepping else 0.0


def _throttled(run: RunFacts) -> float:
    """Return the ratio by which computation takes longer because GPUs are throttled for a reason that can be removed.

    A GPU at its default power limit is not: at full load, its power limits its clock (an H200 with large matrix
    products runs at 73% of its highest clock).
    """
    measured = map(avoidable_throttling, run.ranks)
    known = [throttled * (1.0 - clock) for throttled, clock in measured if clock]
    return fmean(known) if known else 0.0


def avoidable_throttling(one: RankFacts) -> tuple[float, float | None]:
    """Return the same as `throttling`, without a default power limit as the reason."""
    is_lowered = one.now.gpu is not None and one.now.gpu.is_power_limit_lowered
    return throttling(one) if is_lowered else throttling(one, without=_POWER_CAP)


def throttling(one: RankFacts, without: str = "") -> tuple[float, float | None]:
    """Return the ratio of the time in which a rank's GPU was throttled, and its mean clock relative to the maximum."""
    gpu = one.spent.gpu
    clock = one.rate(gpu.clock_ratio_seconds)
    longest = max((spent for reason, spent in (gpu.throttled or {}).items() if reason != without), default=0.0)
    return min(longest / one.seconds, 1.0), clock if clock is None else min(clock, 1.0)


def _data_cause(run: RunFacts, thresholds: Thresholds) -> str:
    """Return the cause of late data: loader workers compute, wait for storage, or it is unknown."""
    busy = workers_busy(run.ranks)
    if busy is None:
        return "data"
    if busy > thresholds.workers_busy:
        return "data_cpu"
    return "data_io" if busy < thresholds.workers_idle else "data"


def workers_busy(ranks: tuple[RankFacts, ...]) -> float | None:
    """Return the ratio of the time in which a loader worker computes or waits for a CPU. None without workers."""
    sums: dict[str, float] = defaultdict(float)
    for one in ranks:
        process = one.spent.process
        if one.now.children and process.workers_cpu is not None:
            sums["used"] += (process.workers_cpu + (process.workers_run_queue or 0.0)) / one.seconds
            sums["workers"] += one.now.children
    return sums["used"] / sums["workers"] if sums["workers"] else None


def loader_busy(one: RankFacts) -> float | None:
    """Return the ratio of the time in which a loader worker of this rank makes batches. None if unknown."""
    working, idle = one.spent.loader_working, one.spent.loader_idle
    if working is None or idle is None or working + idle <= 0.0:
        return None
    return working / (working + idle)
