"""A run in which no rank makes progress, and the rank that the others wait for.

The run hangs if it makes no progress for `stuck_pace` times its longest pause in the last hour (at least `stuck_floor`,
at most `stuck` seconds; in a start-up, checkpoint or evaluation up to `planned`). For a run that has trained for longer
than the exporter, the longest step that it recorded counts as its longest pause at first. If the others wait for a rank
in its start-up, the limit depends on what that rank does:

- It is idle (`idle`), and another rank has begun to train, that is, it is in a collective of DDP or has made a backward
  pass: `stuck_early` seconds.
- It is idle, and no rank has begun to train: `startup` seconds, because it may wait for a download.
- It works, or that is unknown: `planned` seconds, because it may load, compile or index.

The time in which all ranks are stopped, as by a scheduler that suspends their job, does not count.

To be idle, it must have been so for half of that time. It is shown from the first seconds, as not yet an alert.

The finding names, in this order:

1. A rank that others wait for, directly or through other ranks, and that waits for no rank itself. In a collective, a
   rank waits for the ranks of its group that have issued fewer collectives (`diagnosis/waits.py`). It may have finished
   (cause `finished`), for example because it had fewer batches.
   Of several, one that is stopped: by a signal (SIGSTOP), a debugger or a cgroup's freezer (cause `stopped`).
2. A stopped rank.
3. A rank that is in no collective. With CUDA and NCCL the device waits, not the host: a rank whose host waits for the
   device, or is outside of all phases, counts as being in a collective.
4. If all ranks are in a collective, the one without progress for the longest time (cause `inside_collective`).

A single process outside of all phases is not a hang: it may be a prompt or a notebook that waits for input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from rankscope.record import phases
from rankscope_exporter.diagnosis.activity import INTERVAL
from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    blocking_ranks,
    collectives_behind,
    unfinished_group,
    waits,
    with_unused_groups,
)

KIND = "hang"
INSIDE = "inside_collective"
FINISHED = "finished"
STOPPED = "stopped"
GOES_ON = 60.0  # longest time for which ranks go on after a rank that they wait for has finished
Issued = Mapping[int, Mapping[str, float]]
"""The number of issued collectives by rank and group."""
SHOWN_AFTER = 5.0  # seconds without progress; shown long before it is a finding
STARTUP = "startup"
DDP = "ddp_"
"""The prefix of collectives that DDP issues only in a forward or backward pass."""


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the hang from its first seconds on.

    In a planned phase, yield it after half of the time allowed for it, unless others wait for a rank in its start-up.
    """
    run = window.run
    stalled = min(run.stalled, past.runs_for)
    if _planned(run) == {STARTUP} and (waited_for := ranks_behind(run)):
        needed, lacks = _startup_limit(run, past, waited_for, window.thresholds)
        if stalled >= min(needed, SHOWN_AFTER):
            yield replace(_candidate(run, waited_for, needed), lasted=stalled, lacks=lacks)
        return
    limits = [stall_limit(run, past, window.thresholds, has_evidence=known) for known in (False, True)]
    if not run.ranks or stalled < _shown_after(run, past, min(limits)):
        return
    behind = ranks_behind(run)
    if is_interactive(run) and not behind:
        return
    needed = limits[bool(behind)]
    if stalled >= _shown_after(run, past, needed):
        yield replace(_candidate(run, behind, needed), lasted=stalled)


def _candidate(run: RunFacts, behind: dict[int, float], needed: float) -> Candidate:
    one, cause = _choose_rank(run, behind)
    evidence = {
        "stalled": one.at - one.last_progress,
        "behind": float(behind.get(one.rank, 0.0)),
        "ranks_behind": float(len(behind)),
    }
    return Candidate(KIND, 1.0, cause, place(one), evidence, needed=needed)


def _startup_limit(run: RunFacts, past: Past, waited_for: Collection[int], thresholds: Thresholds) -> tuple[float, str]:
    """Return the seconds without progress after which a run with a rank in its start-up hangs, and what it lacks."""
    others = [one for one in run.ranks if one.rank not in waited_for]
    limit = thresholds.stuck_early if any(map(_has_begun, others)) else thresholds.startup
    in_collective = any(one.now.collective for one in run.ranks if one.rank in waited_for)
    idle = 0.0 if in_collective else min(past.idle.get(rank, 0.0) for rank in waited_for)
    # A rank may work for a moment after its last progress.
    if idle >= limit / 2 or (idle and run.stalled - idle <= 2 * INTERVAL):
        return min(limit, thresholds.planned), "time"
    return thresholds.planned, STARTUP


def _has_begun(one: RankFacts) -> bool:
    """Return whether a rank has begun to train."""
    counters = one.now.counters
    return counters.steps > 0 or counters.micro_steps > 0 or one.now.operation.startswith(DDP)


def _shown_after(run: RunFacts, past: Past, needed: float) -> float:
    return needed / 2 if _planned(run) else min(needed, max(SHOWN_AFTER, 2.0 * (past.longest_pause or 0.0)))


def is_interactive(run: RunFacts) -> bool:
    """Return whether the run is a single process outside of all named phases."""
    return len(run.ranks) == 1 and run.ranks[0].now.phase == "other"


def stall_limit(run: RunFacts, past: Past, thresholds: Thresholds, *, has_evidence: bool) -> float:
    """Return the seconds without progress after which the run hangs."""
    if planned := _planned(run):
        return max(_planned_limit(past.longest_planned_pauses.get(phase), phase, thresholds) for phase in planned)
    if past.longest_pause is None:
        return thresholds.stuck_early if has_evidence else thresholds.stuck
    return min(max(thresholds.stuck_pace * past.longest_pause, thresholds.stuck_floor), thresholds.stuck)


def _planned(run: RunFacts) -> set[str]:
    return {one.now.phase for one in run.ranks} & set(phases.PLANNED)


def _planned_limit(pace: float | None, phase: str, thresholds: Thresholds) -> float:
    if pace is None or phase == "startup":  # a start-up does not predict how long the next one takes
        return thresholds.planned
    return min(max(thresholds.stuck_pace * pace, thresholds.stuck), thresholds.planned)


def ranks_behind(run: RunFacts) -> dict[int, float]:
    """Return the ranks that the others finally wait for, and how many collectives each is behind in one group."""
    living = {one.rank: one.now.issued for one in run.ranks}
    issued = with_unused_groups({one.rank: one.issued for one in _finished(run)} | living)
    # A rank outside of collectives may have one in flight. It does not wait for it if other ranks wait for the rank.
    late = _blocking_ranks(run, issued, _is_waiting) or _blocking_ranks(run, issued, lambda _: True)
    return {rank: count for rank in late if (count := collectives_behind(rank, issued)) > 0.0}


def _blocking_ranks(run: RunFacts, issued: Issued, is_waiting: Callable[[RankFacts], bool]) -> set[int]:
    positions = [
        Position(one.rank, issued[one.rank], waits_in=_operation(one, issued) if is_waiting(one) else None)
        for one in run.ranks
    ] + [Position(one.rank, issued[one.rank]) for one in _finished(run)]
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, counts in issued.items():
        for group in counts:
            groups[group].append(rank)
    return {rank for ranks in blocking_ranks(waits(positions, groups)) if len(ranks) == 1 for rank in ranks}


def _operation(one: RankFacts, issued: Issued) -> Operation | None:
    """Return the collective that a rank is in. If that is unknown, choose one that another rank has not issued."""
    group = one.now.collective or unfinished_group(one.rank, issued) or ""
    count = one.now.issued.get(group)
    return None if count is None else Operation("", group, count)


def _is_waiting(one: RankFacts) -> bool:
    return _is_in_collective_on_host(one) or _waits_for_the_device(one)


def _is_in_collective_on_host(one: RankFacts) -> bool:
    """Return whether the host is in a collective. A planned phase, such as a start-up, hides it from the phases."""
    return one.now.phase == WAIT or bool(one.now.collective)


def _finished(run: RunFacts) -> Sequence[RankReading]:
    """Return the ranks that the others may wait for because they have ended as they should.

    If the others went on for long after that, they do not wait for it: their group has become smaller, or the rank's
    process trains on without the hook. Collectives of a rank that has issued none are unknown.
    """
    living = {one.rank for one in run.ranks}
    progress = max((one.now.last_progress for one in run.ranks), default=inf)
    return [
        one
        for one in run.ended
        if one.ended and one.ended.reason == FINISHED and one.rank not in living and one.issued
        if progress - one.ended.at < GOES_ON
    ]


def _choose_rank(run: RunFacts, behind: dict[int, float]) -> tuple[RankReading, str]:
    for ended in _finished(run):
        if ended.rank in behind:
            return ended, FINISHED
    late = [one for one in run.ranks if one.rank in behind]
    stopped = [one for one in late or run.ranks if one.now.is_stopped]
    candidates = stopped or late or [one for one in run.ranks if not _is_in_a_collective(run, one)]
    if candidates:
        one = max(candidates, key=lambda one: one.stalled)
        return one.now, STOPPED if stopped else one.now.phase
    return max(run.ranks, key=lambda one: one.stalled).now, INSIDE


def _is_in_a_collective(run: RunFacts, one: RankFacts) -> bool:
    return _is_in_collective_on_host(one) or (_waits_for_the_device(one) and len(run.ranks) > 1)


def _waits_for_the_device(one: RankFacts) -> bool:
    now = one.now
    return now.phase in ("device_wait", "other") and now.counters.device_steps > 0 and bool(now.issued)


DETECTOR = StateDetector((KIND,), detect, is_critical=True, stops_run=True, explained_by=("crash",))
