"""A rank that slows down the others: they wait for it in collectives, and it waits least.

    lag = median wait of its peers - own wait        (with two ranks: the other's wait - own wait)

The lag is a ratio of the step, in steps without a planned phase. Peers do the same work: they are the ranks of the same
group and, in a pipeline, of the same stage. The cause is the phase in which the rank exceeds the mean of its peers
most, if that is more than `cause` times the lag. For slow computation it is one of these reasons, if it is present:

- `throttled`: its GPU is throttled, for longer or to a lower clock than the GPUs of its peers; at its default power
  limit only if those of its peers are not throttled, since more work makes that last longer
- `foreign_process`: its GPU is shared with more processes that are not ranks than the GPU of a peer
- `cpu_contention`: its training thread waits for CPU time, for more than `cause` times the lag
- `aggregation`: rank 0 sends more bytes in collectives than its next peer, or its GPU is busier and uses more memory
- `expert_imbalance`: it sends more bytes in all_to_all than its peers, because more tokens are routed to its experts

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
from rankscope_exporter.diagnosis.lost import avoidable_throttling, throttling
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "straggler"
UNKNOWN = "unknown"
SLOW_DEVICE = (*phases.COMPUTING, "device_wait", UNKNOWN)
RARELY_THROTTLED = 0.05
"""Ratio of the time up to which a GPU is not limited by its default power limit."""
NOT_AGGREGATION = ("data_wait", "h2d_copy", *phases.PLANNED)
GONE = 0.1
"""Ratio of the lag up to which one computing phase explains nothing of it, if another one does."""


def measure(window: Window) -> Mapping[int | None, float]:
    """Return the lag of each rank."""
    return {one.rank: one.lag for one in window.run.ranks if one.lag is not None}


def explain(window: Window, rank: int | None) -> Candidate | None:
    """Return the straggler and its cause; None if every rank's data is late or ranks are late in turn."""
    run, thresholds = window.run, window.thresholds
    one = next(one for one in run.ranks if one.rank == rank)
    if one.lag is None or one.lag < thresholds.single * mean_skew(run):
        return None
    others = [other for other in run.peers[one.peers] if other is not one]
    excess = excesses(one, others)
    cause = _cause(run, one, others, excess, thresholds)
    if cause == "data_wait" and data.are_loaders_slow(run, thresholds, one):
        return None
    evidence = {"lag": one.lag, "wait": one.wait, "group_wait": fmean(other.wait for other in others)}
    evidence |= {"excess": excess[cause]} if cause in excess else _reason_evidence(one, cause)
    return Candidate(KIND, one.lag, cause, place(one.now), evidence)


def mean_skew(run: RunFacts) -> float:
    """Return the mean wait of the other ranks for the last one of their peers, as a ratio of the step.

    Like a lag, it is what the late ranks cost each step: all other ranks wait for the last one, which itself does not.
    """
    shares = []
    for members in run.peers.values():
        least = min(one.wait for one in members)
        all_to_others = len(members) / max(len(members) - 1, 1)
        for one in members:
            aligned = one.spent.aligned
            skew = aligned.skew / aligned.seconds if aligned.seconds > 0.0 else one.wait - least
            shares.append(all_to_others * skew)
    return fmean(shares) if shares else 0.0


def excesses(one: RankFacts, others: Sequence[RankFacts]) -> Mapping[str, float]:
    """Return by phase how much longer a rank is in it than the mean of the others. A missing phase counts as 0."""
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
    if phase not in NOT_AGGREGATION and _aggregates(one, others, thresholds, is_foreign=is_foreign):
        return "aggregation"
    if phase in SLOW_DEVICE and reason is None and _has_more_tokens(one, others, thresholds):
        return "expert_imbalance"
    return reason or phase


def _has_more_tokens(one: RankFacts, others: Sequence[RankFacts], thresholds: Thresholds) -> bool:
    """Return whether its experts get more tokens: a rank returns all that it received in the next all_to_all."""
    return exchanged_bytes(one) > thresholds.aggregation * median(map(exchanged_bytes, others))


def exchanged_bytes(one: RankFacts) -> float:
    """Return the bytes that a rank sent in all_to_all."""
    return one.spent.collectives.bytes.get("all_to_all", 0.0)


def _slow_device(
    run: RunFacts, one: RankFacts, others: Sequence[RankFacts], needed: float, thresholds: Thresholds
) -> str | None:
    """Return the first reason that is present."""
    if _is_throttled(one, others, thresholds):
        return "throttled"
    if run.foreign_processes(one) > min(map(run.foreign_processes, others)):
        return "foreign_process"
    queues = [queue for each in run.ranks if (queue := each.rate(each.spent.process.run_queue)) is not None]
    own = one.rate(one.spent.process.run_queue)
    return "cpu_contention" if own is not None and own - fmean(queues) > needed else None


def _is_throttled(one: RankFacts, others: Sequence[RankFacts], thresholds: Thresholds) -> bool:
    """Return whether its GPU is throttled for longer or to a lower clock than the GPUs of its peers.

    If all need more power than their default limit, more work makes it last longer, and lowers the mean clock.
    """
    throttled, clock = throttling(one)
    peers = [throttling(other) for other in others]
    if avoidable_throttling(one)[0] <= thresholds.throttled and max(ratio for ratio, _ in peers) > RARELY_THROTTLED:
        return False
    if throttled - min(ratio for ratio, _ in peers) > thresholds.throttled:
        return True
    highest = max((clock for _, clock in peers if clock), default=0.0)
    return throttled > thresholds.throttled and (clock or 1.0) < thresholds.throttled_clock * highest


def _aggregates(one: RankFacts, others: Sequence[RankFacts], thresholds: Thresholds, *, is_foreign: bool) -> bool:
    """Return whether rank 0 has the work of all ranks as well. The first stage also sends more than the next one."""
    if one.rank != 0:
        return False
    both = one, min(others, key=lambda other: other.rank)
    own_bytes, other_bytes = (sum(each.spent.collectives.bytes.values()) - exchanged_bytes(each) for each in both)
    if own_bytes > thresholds.aggregation * other_bytes:
        return True
    own_memory, other_memory = ((each.now.gpu and each.now.gpu.memory_ratio) or 0.0 for each in both)
    own_busy, other_busy = (each.rate(each.spent.gpu.busy) or 0.0 for each in both)
    return own_memory > thresholds.aggregation * other_memory and own_busy > 0.05 + other_busy and not is_foreign


def _reason_evidence(one: RankFacts, cause: str) -> Mapping[str, float]:
    throttled, clock = throttling(one)
    known = {
        "throttled": ("throttled", throttled),
        "foreign_process": ("processes", float((one.now.gpu and one.now.gpu.processes) or 0)),
        "cpu_contention": ("run_queue", one.rate(one.spent.process.run_queue) or 0.0),
        "expert_imbalance": ("exchanged_bytes", exchanged_bytes(one)),
    }
    name, value = known.get(cause, ("clock", clock))
    return {} if value is None else {name: value}


def is_contradicted(candidate: Candidate, newest: Candidate, window: Window) -> bool:
    """Return whether a rank's lag has another cause now, and its first cause explains too little of it.

    A reason for slow computation is not contradicted by slow computation without it: it may come and go.
    """
    before, now = candidate.cause, newest.cause
    if candidate.kind != KIND or now in (before, UNKNOWN) or before == UNKNOWN:
        return False
    one = next(one for one in window.run.ranks if one.rank == candidate.place.rank)
    excess = excesses(one, [other for other in window.run.peers[one.peers] if other is not one])
    needed = window.thresholds.cause
    if before in excess:
        needed = GONE if before in SLOW_DEVICE and now in SLOW_DEVICE else needed
        return excess[before] <= needed * newest.ratio
    of_reason = excess.keys() - NOT_AGGREGATION if before == "aggregation" else excess.keys() & SLOW_DEVICE
    return sum(excess[phase] for phase in of_reason) <= needed * newest.ratio


# If all data is late, one of the ranks is the last by chance.
DETECTOR = LossDetector(
    KIND, measure, explain, is_compared=True, has_rivals=True, explained_by_cause=(("data_wait", ("data", "")),)
)
