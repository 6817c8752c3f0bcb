"""A rank that slows down the others: they wait for it in collectives, and it waits least.

    lag = median of its peers' waits - own wait        (of two ranks: the larger wait - own wait)

as a ratio of the step, in steps without a planned phase. Its peers do the same work: ranks of its group and, in a
pipeline, of its stage. Its cause is the phase in which it exceeds the mean of the
other ranks most, if that explains `cause` of the lag; for slow computation the reason, if one is seen from outside:

- `throttled`: the clocks of its GPU are held down, for longer or lower than those of its group
- `foreign_process`: a process that is no rank is on its GPU
- `cpu_contention`: its training thread waits for CPU time, and that explains `cause` of the lag
- `aggregation`: rank 0 hands more to collectives than rank 1, or its GPU is busier and fuller
- `expert_imbalance`: it hands more to all_to_all than its peers do: more tokens are routed to its experts

The method of comparing waits is that of straggler detection in synchronous training (Greyhound, ATC'25; "Understanding
Stragglers in Large Model Training Using What-if Analysis", arXiv:2505.05713).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis.detectors import data
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, place
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.lost import throttling
from rankscope_exporter.diagnosis.step_times import p99_to_median
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "straggler"
UNKNOWN = "unknown"
SLOW_DEVICE = (*phases.COMPUTING, "device_wait", UNKNOWN)
NOT_AGGREGATION = ("data_wait", "h2d_copy", *phases.PLANNED)


def measure(window: Window) -> Mapping[int | None, float]:
    """Return the lag of each rank."""
    return {one.rank: one.lag for one in window.run.ranks if one.lag is not None}


def explain(window: Window, rank: int | None) -> Candidate | None:
    """Return the straggler and its cause; None if every rank's data is late, or if ranks are late in turn."""
    run, thresholds = window.run, window.thresholds
    one = next(one for one in run.ranks if one.rank == rank)
    if one.lag is None or one.lag < thresholds.single * waited(run):
        return None
    others = [other for other in run.peers[one.peers] if other is not one]
    excess = excesses(one, others)
    cause = _cause(run, one, others, excess, thresholds)
    if cause == "data_wait" and data.are_loaders_slow(run, thresholds, one):
        return None
    evidence = {"lag": one.lag, "wait": one.wait, "group_wait": fmean(other.wait for other in others)}
    evidence |= {"excess": excess[cause]} if cause in excess else _reason_evidence(one, cause)
    return Candidate(KIND, one.lag, cause, place(one), evidence)


def waited(run: RunFacts) -> float:
    """Return what the ranks wait on average beyond the one that waits least, as a ratio of the step."""
    shares = []
    for members in run.peers.values():
        least = min(one.wait for one in members)
        for one in members:
            aligned = one.spent.aligned
            shares.append(aligned.skew / aligned.seconds if aligned.seconds > 0.0 else one.wait - least)
    return fmean(shares) if shares else 0.0


def excesses(one: RankFacts, others: Sequence[RankFacts]) -> Mapping[str, float]:
    """Return by phase how much longer a rank is in it than the others on average. A phase that a rank lacks is 0."""
    names = {phase for each in (one, *others) for phase in each.step_ratios} - {WAIT, *phases.PLANNED}
    return {
        phase: one.step_ratios.get(phase, 0.0) - fmean(other.step_ratios.get(phase, 0.0) for other in others)
        for phase in sorted(names)
    }


def _cause(
    run: RunFacts, one: RankFacts, others: Sequence[RankFacts], excess: Mapping[str, float], thresholds: Thresholds
) -> str:
    needed = thresholds.cause * (one.lag or 0.0)
    largest = max(excess, key=excess.__getitem__, default=UNKNOWN)
    phase = largest if excess.get(largest, 0.0) > needed else UNKNOWN
    reason = _slow_device(run, one, others, needed, thresholds) if phase in SLOW_DEVICE else None
    is_foreign = reason == "foreign_process"
    if phase not in NOT_AGGREGATION and _aggregates(run, one, thresholds, is_foreign=is_foreign):
        return "aggregation"
    if phase in SLOW_DEVICE and reason is None and _has_more_tokens(one, others, thresholds):
        return "expert_imbalance"
    return reason or phase


def _has_more_tokens(one: RankFacts, others: Sequence[RankFacts], thresholds: Thresholds) -> bool:
    """Return whether more goes through its experts: what it was sent goes back by the next all_to_all."""
    return exchanged(one) > thresholds.aggregation * median(map(exchanged, others))


def exchanged(one: RankFacts) -> float:
    """Return the bytes that a rank handed to all_to_all."""
    return one.spent.collectives.bytes.get("all_to_all", 0.0)


def _slow_device(
    run: RunFacts, one: RankFacts, others: Sequence[RankFacts], needed: float, thresholds: Thresholds
) -> str | None:
    """Return the first reason that holds."""
    throttled, clock = throttling(one)
    if throttled > thresholds.throttled:
        peers = [throttling(other) for other in others]
        least = min(ratio for ratio, _ in peers)
        highest = max((clock for _, clock in peers if clock), default=0.0)
        if throttled - least > thresholds.throttled or (clock or 1.0) < thresholds.throttled_clock * highest:
            return "throttled"
    gpu = one.now.gpu
    ranks_on_it = sum(other.now.uuid == one.now.uuid for other in run.ranks)
    if gpu and gpu.processes is not None and one.now.uuid and gpu.processes > ranks_on_it:
        return "foreign_process"
    queues = [queue for each in run.ranks if (queue := each.rate(each.spent.process.run_queue)) is not None]
    own = one.rate(one.spent.process.run_queue)
    return "cpu_contention" if own is not None and own - fmean(queues) > needed else None


def _aggregates(run: RunFacts, one: RankFacts, thresholds: Thresholds, *, is_foreign: bool) -> bool:
    first = next((other for other in run.ranks if other.rank == 1), None)
    if one.rank != 0 or first is None:
        return False
    handed, usual = (sum(each.spent.collectives.bytes.values()) - exchanged(each) for each in (one, first))
    if handed > thresholds.aggregation * usual:
        return True
    full, fuller = ((each.now.gpu and each.now.gpu.memory_ratio) or 0.0 for each in (first, one))
    busy, busier = (each.rate(each.spent.gpu.busy) or 0.0 for each in (first, one))
    return fuller > thresholds.aggregation * full and busier > 0.05 + busy and not is_foreign


def _reason_evidence(one: RankFacts, cause: str) -> Mapping[str, float]:
    throttled, clock = throttling(one)
    known = {
        "throttled": ("throttled", throttled),
        "foreign_process": ("processes", float((one.now.gpu and one.now.gpu.processes) or 0)),
        "cpu_contention": ("run_queue", one.rate(one.spent.process.run_queue) or 0.0),
        "expert_imbalance": ("exchanged_bytes", exchanged(one)),
    }
    name, value = known.get(cause, ("clock", clock))
    return {} if value is None else {name: value}


def has_spikes(run: RunFacts, thresholds: Thresholds) -> bool:
    """Return whether few steps are far longer than the rest: then chance may choose one rank for a while."""
    return p99_to_median(run) > thresholds.spike


DETECTOR = LossDetector(KIND, measure, explain)
