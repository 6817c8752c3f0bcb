"""Ranks that slow down the others: these wait for them in collectives, and the late ranks wait least.

    lag = mean wait of the others - mean wait of the late ranks

The lag is a ratio of the step, in steps without a planned phase. Ranks that do the same work are compared: those of
the same group and, in a pipeline, of the same stage. Their mean waits are split at the largest gap
(`diagnosis/late_set.py`): those that wait less are the late ranks, one or most of them, and one finding. It counts if
the others' wait is more than `allowance` of the GPU time: one fast rank of many is no fault.

- `straggler`: late ranks that wait least in each step. They are named by the smallest place that has all of them and
  no other rank: a GPU, a node, or a place in the layout (context, tensor or expert parallel). If both have the same
  ranks, it is the hardware if there is evidence against it or the loss began later, else the layout.
- `rotating_straggler`: ranks that are late in turn, so that even the one that waits least waits for others. They are
  named if they are few. Its loss is the others' mean wait for the last rank in each step, less what ranks explain that
  are always late, if that is more than by chance.

The cause of a straggler is the phase in which the ranks exceed the mean of the others most, if that is more than
`cause` times the lag. For slow computation it is one of these reasons, if all of the late ranks have it:

- `throttled`: its GPU is throttled, for longer or to a lower clock than the GPUs of its peers; at its default power
  limit only if those of its peers are not throttled, since more work makes that last longer
- `foreign_process`: its GPU is shared with more processes that are not ranks than the GPU of a peer
- `cpu_contention`: its training thread waits for CPU time, for more than `cause` times the lag
- `aggregation`: rank 0 sends more bytes in collectives than its next peer, or it receives data and the others wait for
  what it sends back, or its GPU is busier and uses more memory
- `expert_imbalance`: it sends more bytes in all_to_all than its peers, because more tokens are routed to its experts

Ranks that are late in turn have the cause `gc` if Python's garbage collector explains half of the waiting; `spikes` if
single steps are far longer than the rest; `uneven_work` if they are late in computing; else the phase that delays them
most. The work of many jobs is uneven: their samples differ in length. That is a loss of the run, but no fault. Without
other evidence, it is a finding only beyond `uneven_allowance`, or beyond the run's own baseline if that is less.

The method of comparing waits is that of straggler detection in synchronous training (Greyhound, ATC'25; "Understanding
Stragglers in Large Model Training Using What-if Analysis", arXiv:2505.05713).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import NormalDist, fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis import chance
from rankscope_exporter.diagnosis.detectors import data
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import LAYOUT, Candidate, Place
from rankscope_exporter.diagnosis.late_set import Ranks, late_sets
from rankscope_exporter.diagnosis.lost import avoidable_throttling, throttling
from rankscope_exporter.diagnosis.step_times import events, has_spikes
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND, IN_TURN = "straggler", "rotating_straggler"
UNKNOWN = "unknown"
SLOW_DEVICE = (*phases.COMPUTING, "device_wait", UNKNOWN)
REASONS = ("throttled", "foreign_process", "cpu_contention")
"""Causes that are evidence against a GPU or a process."""
RARELY_THROTTLED = 0.05
"""Ratio of the time up to which a GPU is not limited by its default power limit."""
NOT_AGGREGATION = ("data_wait", "h2d_copy", *phases.PLANNED)
GATHERING, ANSWERING = ("recv", "gather", "reduce"), ("recv", "broadcast", "scatter")
"""The operations in which rank 0 receives what it aggregates, and in which the other ranks wait for its result."""
RECEIVED = 0.01
"""Ratio of rank 0's bytes in collectives from which on it receives data, not only single values such as the loss."""
GONE = 0.1
"""Ratio of the lag up to which one computing phase explains nothing of it, if another one does."""
UNEVEN_WORK, COLLECTOR, SPIKES = "uneven_work", "gc", "spikes"
COLLECTOR_SHARE = 0.5
SOME_TIME = 40.0
"""Seconds for which ranks may be late one after the other, each only once, as while their garbage is collected."""
NOT_WORK = (COLLECTOR, SPIKES, "data_wait", "h2d_copy")
"""Causes that are evidence that it is not the ranks' work that is uneven."""
FEW, MOST_OF_BLAME, TURNS = 8, 0.9, 6
"""Ranks that are late in turn are named if at most so many are late in so much of the time, after so many turns."""
UNEVEN_STEPS = 2.0
"""So many steps count as one event when ranks take turns: the lags of uneven work differ by about their mean."""


def measure(window: Window) -> Mapping[int, float]:
    """Return the wait of each rank for later ones. The lag of any set follows from it."""
    return window.run.skews


def sets(run: RunFacts, thresholds: Thresholds, known: Collection[int] = ()) -> Iterator[Ranks]:
    """Yield the late sets of a window among the ranks that are not known to be late."""
    for members in run.peers.values():
        waits = {one.rank: run.skews[one.rank] for one in members if one.rank in run.skews}
        yield from late_sets(waits, thresholds.loss, thresholds.allowance, known)


def explain(window: Window, ranks: Ranks) -> Candidate | None:
    """Return the late ranks and their cause; None if every rank's data is late or ranks are late in turn."""
    run, thresholds = window.run, window.thresholds
    late, others = _divided(run, ranks)
    lag = fmean(one.wait for one in others) - fmean(one.wait for one in late)
    if lag <= 0.0 or _steady_share(run, late[0]) < thresholds.single:
        return None
    excess = excesses(late, others)
    cause = _cause(window, late, others, lag, excess)
    if cause == "data_wait" and data.are_loaders_slow(run, thresholds, late, lag):
        return None
    evidence = {"lag": lag, "wait": fmean(one.wait for one in late), "group_wait": fmean(one.wait for one in others)}
    evidence |= {"excess": excess[cause]} if cause in excess else _reason_evidence(late[0], cause)
    return Candidate(KIND, lag, cause, _place(run, ranks, is_hardware=window.is_onset or cause in REASONS), evidence)


def _divided(run: RunFacts, ranks: Ranks) -> tuple[Sequence[RankFacts], Sequence[RankFacts]]:
    """Return the ranks and those of their peers that are not late either."""
    peers, own = run.peers_of(ranks[0]), frozenset(ranks)
    late, others = [one for one in peers if one.rank in own], [one for one in peers if one.rank not in own]
    middle = (fmean(one.wait for one in late) + max(one.wait for one in peers)) / 2
    return late, [one for one in others if one.wait > middle] or others


def _steady_share(run: RunFacts, late: RankFacts) -> float:
    """Return which part of the peers' wait is for ranks that are always late: then one of them does not wait."""
    waits = [run.skews.get(one.rank, 0.0) for one in run.peers[late.peers]]
    return 1.0 - len(waits) * min(waits) / total if (total := sum(waits)) else 1.0


def _place(run: RunFacts, ranks: Ranks, *, is_hardware: bool) -> Place:
    """Return the place that has exactly these ranks."""
    readings = [one.now for one in run.ranks]
    first = next(now for now in readings if now.rank == ranks[0])

    def common(values: Mapping[int, str]) -> tuple[str, bool]:
        """Return a value that the ranks have in common, and whether no other rank has it."""
        of_late = {values[rank] for rank in ranks}
        value = of_late.pop() if len(of_late) == 1 else ""
        return value, bool(value) and [*values.values()].count(value) == len(ranks)

    uuid, is_gpu = common({now.rank: now.uuid for now in readings})
    node, is_node = common({now.rank: now.node for now in readings})
    gpu = first.gpu.index if uuid and first.gpu else ""
    hardware = f"GPU {gpu}" if is_gpu else f"node {node}" if is_node else ""
    places = {kind: {now.rank: str(now.coordinates.get(kind, "")) for now in readings} for kind in LAYOUT}
    found = {kind: number for kind, values in places.items() for number, is_place in (common(values),) if is_place}
    layout = next((f"{LAYOUT[kind]} {number}" for kind, number in found.items()), "")
    named = Place(None if len(ranks) > 1 else ranks[0], first.group, node, ranks=ranks)
    if layout and not is_hardware:
        return named._replace(place=layout, also=hardware)
    return named._replace(gpu=gpu, uuid=uuid, place=hardware, also=layout)


def excesses(late: Sequence[RankFacts], others: Sequence[RankFacts]) -> Mapping[str, float]:
    """Return by phase how much longer ranks are in it than the others on average. A missing phase counts as 0."""
    names = {phase for one in (*late, *others) for phase in one.step_ratios} - {WAIT, *phases.PLANNED}
    return {
        phase: fmean(one.step_ratios.get(phase, 0.0) for one in late)
        - fmean(one.step_ratios.get(phase, 0.0) for one in others)
        for phase in sorted(names)
    }


def _cause(
    window: Window, late: Sequence[RankFacts], others: Sequence[RankFacts], lag: float, excess: Mapping[str, float]
) -> str:
    run, thresholds = window.run, window.thresholds
    needed = thresholds.cause * lag
    largest = max(excess, key=excess.__getitem__, default=UNKNOWN)
    phase = largest if excess.get(largest, 0.0) > needed else UNKNOWN
    reason = _slow_device(run, late, others, needed, thresholds) if phase in SLOW_DEVICE else None
    is_foreign = reason == "foreign_process"
    if phase not in NOT_AGGREGATION and _aggregates(late, others, needed, thresholds, is_foreign=is_foreign):
        return "aggregation"
    if phase in SLOW_DEVICE and reason is None and _have_more_tokens(late, others, thresholds):
        return "expert_imbalance"
    return reason or phase


def _have_more_tokens(late: Sequence[RankFacts], others: Sequence[RankFacts], thresholds: Thresholds) -> bool:
    """Return whether their experts get more tokens: a rank returns all that it received in the next all_to_all."""
    return min(map(exchanged_bytes, late)) > thresholds.aggregation * median(map(exchanged_bytes, others))


def exchanged_bytes(one: RankFacts) -> float:
    """Return the bytes that a rank sent in all_to_all."""
    return one.spent.collectives.bytes.get("all_to_all", 0.0)


def _slow_device(
    run: RunFacts, late: Sequence[RankFacts], others: Sequence[RankFacts], needed: float, thresholds: Thresholds
) -> str | None:
    """Return the first reason that all of the late ranks have."""
    if all(_is_throttled(one, others, thresholds) for one in late):
        return "throttled"
    usual = min(map(run.foreign_processes, others))
    if all(run.foreign_processes(one) > usual for one in late):
        return "foreign_process"
    queues = [queue for each in others if (queue := each.rate(each.spent.process.run_queue)) is not None]
    own = [one.rate(one.spent.process.run_queue) for one in late]
    is_queueing = all(queue is not None and queue - fmean(queues or (0.0,)) > needed for queue in own)
    return "cpu_contention" if is_queueing else None


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
    return throttled > thresholds.throttled and (clock or 1.0) < (1.0 - thresholds.loss) * highest


def _aggregates(
    late: Sequence[RankFacts], others: Sequence[RankFacts], needed: float, thresholds: Thresholds, *, is_foreign: bool
) -> bool:
    """Return whether rank 0 has the work of all ranks as well. The first stage also sends more than the next one."""
    if [one.rank for one in late] != [0]:
        return False
    both = late[0], min(others, key=lambda other: other.rank)
    own_bytes, other_bytes = (sum(each.spent.collectives.bytes.values()) - exchanged_bytes(each) for each in both)
    if own_bytes > thresholds.aggregation * other_bytes or _answers(late[0], others, needed):
        return True
    own_memory, other_memory = ((each.now.gpu and each.now.gpu.memory_ratio) or 0.0 for each in both)
    own_busy, other_busy = (each.rate(each.spent.gpu.busy) or 0.0 for each in both)
    return own_memory > thresholds.aggregation * other_memory and own_busy > 0.05 + other_busy and not is_foreign


def _answers(first: RankFacts, others: Sequence[RankFacts], needed: float) -> bool:
    """Return whether the rank receives data and the others wait for what it sends back.

    Of two ranks, one that aggregates sends no more bytes than the other.
    """
    counted = first.spent.collectives.bytes
    received = sum(counted.get(operation, 0.0) for operation in GATHERING)
    return received > RECEIVED * sum(counted.values()) and fmean(map(_answered, others)) - _answered(first) > needed


def _answered(one: RankFacts) -> float:
    """Return the ratio of the time in which the training thread waits for another rank's result."""
    return sum(one.spent.collectives.seconds.get(operation, 0.0) for operation in ANSWERING) / one.seconds


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
    """Return whether a lag has another cause now, and its first cause explains too little of it.

    A reason for slow computation is not contradicted by slow computation without it: it may come and go.
    """
    before, now = candidate.cause, newest.cause
    if now in (before, UNKNOWN) or before == UNKNOWN:
        return False
    excess = excesses(*_divided(window.run, newest.place.ranks))
    needed = window.thresholds.cause
    if before in excess:
        needed = GONE if before in SLOW_DEVICE and now in SLOW_DEVICE else needed
        return excess[before] <= needed * newest.ratio
    of_reason = excess.keys() - NOT_AGGREGATION if before == "aggregation" else excess.keys() & SLOW_DEVICE
    return sum(excess[phase] for phase in of_reason) <= needed * newest.ratio


def measure_in_turn(window: Window) -> float | None:
    """Return the mean wait of the other ranks for the last one."""
    return mean_skew(window.run) if window.run.skews else None


def mean_skew(run: RunFacts) -> float:
    """Return the mean wait of the other ranks for the last one of their peers, as a ratio of the step.

    Like a lag, it is what the late ranks cost each step: all other ranks wait for the last one, which itself does not.
    """
    return _mean_of_others(run, sum)


def _mean_of_others(run: RunFacts, total: Callable[[Sequence[float]], float]) -> float:
    """Return a sum of each group's waits as a mean over all but its last rank."""
    groups = ([run.skews.get(one.rank, 0.0) for one in members] for members in run.peers.values())
    return sum(total(waits) * len(waits) / max(len(waits) - 1, 1) for waits in groups) / max(len(run.ranks), 1)


def explain_in_turn(window: Window, _ranks: Ranks) -> Candidate | None:
    """Return the loss and its cause; None if ranks that are always late, or late data on every rank, explain it."""
    run, thresholds = window.run, window.thresholds
    ratio, late = mean_skew(run), data.late_phase(run)
    least = _mean_of_others(run, lambda waits: len(waits) * min(waits))
    if least < thresholds.single * ratio:
        return None
    if late == "data_wait" and data.measure(window) > thresholds.loss + thresholds.allowance:
        return None
    collecting = sum(one.rate(one.spent.gc_seconds) or 0.0 for one in run.ranks)
    evidence = {"max_lag": run.max_lag, "gc": collecting}
    cause = COLLECTOR if collecting > COLLECTOR_SHARE * ratio else SPIKES if has_spikes(run) else late
    cause = UNEVEN_WORK if cause in phases.COMPUTING else cause or UNKNOWN
    ranks = _taking_turns(run, thresholds)
    needed = SOME_TIME if ranks or cause == COLLECTOR else 0.0
    return Candidate(IN_TURN, ratio, cause, Place(ranks=ranks), evidence, needed=needed)


def _taking_turns(run: RunFacts, thresholds: Thresholds) -> Ranks:
    """Return the few ranks that are late in turn; empty if they are many, or may be few by chance.

    Over hours, they are sought thousands of times, so the limit is far below that of a single loss.
    """
    blame = sorted(((sum(one.spent.aligned.blame.values()), one.rank) for one in run.ranks), reverse=True)
    reached, number = [*accumulate(seconds for seconds, _ in blame)], events(run)
    count = 1 + sum(seconds < MOST_OF_BLAME * reached[-1] for seconds in reached)
    if not 1 < count <= min(FEW, len(blame) // 2) or number < TURNS * len(blame):
        return ()
    number /= UNEVEN_STEPS
    by_chance = chance.of_most(number * reached[count - 1] / reached[-1], number, count, len(blame))
    return tuple(sorted(rank for _, rank in blame[:count])) if by_chance < thresholds.chance**2 else ()


def is_uneven_work(candidate: Candidate) -> bool:
    """Return whether ranks are late in turn without evidence of a fault: neither its cause nor the ranks are known."""
    return candidate.cause not in NOT_WORK and not candidate.place.ranks


def allowance(window: Window) -> float:
    """Return the wait for the last of the compared ranks that a healthy run has by chance."""
    return wait_by_chance(window.thresholds, max(map(len, window.run.peers.values()), default=0))


def wait_by_chance(thresholds: Thresholds, ranks: int) -> float:
    """Return the wait for the last of so many ranks that a healthy run has by chance."""
    return thresholds.step_deviation * expected_wait(ranks) if ranks > 1 else 0.0


def expected_wait(ranks: int) -> float:
    """Return the mean wait for the last of at least two ranks whose steps differ by a standard deviation of 1.

    The expected maximum is Blom's (Statistical Estimates and Transformed Beta-Variables).
    """
    return ranks / (ranks - 1) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# If all data is late, one of the ranks is the last by chance, or several are in turn.
BY_DATA = (("data_wait", (data.KIND, "")),)
DETECTORS = (
    LossDetector(
        KIND, measure, explain, is_compared=True, sets=sets, is_contradicted=is_contradicted, explained_by_cause=BY_DATA
    ),
    LossDetector(
        IN_TURN,
        measure_in_turn,
        explain_in_turn,
        allowance,
        is_compared=True,
        less=KIND,
        is_usual=is_uneven_work,
        unusual_in=(KIND, IN_TURN),
        is_one_per_run=True,
        explained_by=(KIND,),
        explained_by_cause=BY_DATA,
    ),
)
