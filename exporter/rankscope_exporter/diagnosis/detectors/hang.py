"""A run in which no rank makes progress, and the rank that the others wait for.

Progress is a step, a backward pass, an issued collective, a checkpoint, or any event in a start-up, checkpoint or
evaluation. A fetched batch is none, nor a forward pass while a rank waits for another one: the run hangs although one
rank fetches or generates without end.

The run hangs if it has waited for the same thing for `stuck_pace` times the longest such wait in the last hour, and 1.5
times the longest one ever. What it waits for is the phase of the rank that the others wait for, or that all ranks are
in. A wait that was a hang counts for its rank alone, unless there was one for another rank before. Outside of all
phases, these differ: a pause of all ranks, as for rollouts by another process, does not lengthen the limit of ranks
that wait in a collective for one of them. The limit is at least

- `stuck_floor` seconds and 1.5 times the usual step, when the run has stepped for `pace_known_after` seconds. For a run
  that has trained for longer than the exporter, 1.5 times the longest step that it recorded if that is more.
  `stuck` seconds if all ranks compute, none waits for another one, and neither their processes nor their GPUs show
  that they do not compile: those are not idle, and these do not work.
- before that `stuck` seconds, or twice `stuck_floor` and 1.5 times the mean step if the collectives, or being the only
  one that does not wait, show the rank that the others wait for. In the first step, 1.5 times the longest phase, up to
  `stuck`. `planned` seconds up to the second step if no rank waits for another one.
- `stuck` seconds in a checkpoint or evaluation, and `planned` seconds in the first one
- twice `planned` if all ranks are outside of all phases, and none waits for another one

If the others wait for a rank in its start-up, the limit depends on what that rank does:

- It is idle (`idle`), and another rank has begun to train, that is, it is in a collective of DDP or has made a backward
  pass: twice `stuck_floor` seconds.
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

If a node does not answer, its ranks may be the reason: unless another rank is behind, the finding names that node, or a
rank that no exporter shows (cause `node_missing`). Only the analyzer knows of such ranks.

A single process outside of all phases is not a hang: it may be a prompt or a notebook that waits for input. Nor is a
run that does not train (`slow_startup`) and in which no rank waits for another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rankscope.record import phases
from rankscope_exporter.diagnosis.activity import INTERVAL
from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.startup import is_training
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Pending, Place
from rankscope_exporter.diagnosis.readings import are_stopped
from rankscope_exporter.diagnosis.standstill import (
    EVER,
    OUTSIDE,
    SILENT,
    STARTUP,
    STOPPED,
    Standstill,
    key,
    usual_step,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "hang"
BUSY = 0.5
"""Ratio of the time from which on a GPU works: a collective that hangs there runs all the time."""
DDP = "ddp_"
"""The prefix of collectives that DDP issues only in a forward or backward pass."""


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the hang from its first seconds on.

    After half of the allowed time in a planned phase, or if the run has waited for the same before; not if others wait
    for a rank in its start-up.
    """
    run, found = window.run, past.standstill
    if found is None or not run.ranks:
        return
    lacks, shown_after = "time", SILENT
    if _planned(run) == {STARTUP} and found.behind:
        needed, lacks = _startup_limit(run, past, found, window.thresholds)
    elif not found.has_waiting and (run.is_interactive or not is_training(run, window.thresholds)):
        return
    else:
        needed = stall_limit(run, past, found, window.thresholds)
        if needed > window.thresholds.stuck or found.awaited in past.pace:
            shown_after = needed / 2
    if found.seconds >= min(needed, shown_after):
        behind = {"behind": found.behind.get(found.rank.rank, 0.0), "ranks_behind": float(len(found.behind))}
        evidence = {"stalled": found.seconds, **behind}
        where = _missing_place(found) if found.missing else place(found.rank)
        yield Candidate(KIND, 1.0, found.cause, where, evidence, found.seconds, needed, lacks)


def _missing_place(found: Standstill) -> Place:
    """Return the node that does not answer; without a name the ranks that no exporter shows."""
    node, ranks = found.rank.node, found.missing
    rank = ranks[0] if len(ranks) == 1 else None
    return Place(rank, found.rank.group, node, ranks=ranks, place=f"node {node}" if node else "")


def _startup_limit(run: RunFacts, past: Past, found: Standstill, thresholds: Thresholds) -> tuple[float, str]:
    """Return the seconds without progress after which a run with a rank in its start-up hangs, and what it lacks."""
    others = [one for one in run.ranks if one.rank not in found.behind]
    limit = 2.0 * thresholds.stuck_floor if any(map(_has_begun, others)) else thresholds.startup
    in_collective = any(one.now.collective for one in run.ranks if one.rank in found.behind)
    idle = 0.0 if in_collective else min(past.idle.get(rank, 0.0) for rank in found.behind)
    # A rank may work for a moment after its last progress.
    if idle >= limit / 2 or (idle and found.seconds - idle <= 2 * INTERVAL):
        return min(limit, thresholds.planned), "time"
    return thresholds.planned, STARTUP


def _has_begun(one: RankFacts) -> bool:
    """Return whether a rank has begun to train."""
    counters = one.now.counters
    return counters.steps > 0 or counters.micro_steps > 0 or one.now.operation.startswith(DDP)


def undecided(window: Window, candidates: Collection[Candidate]) -> Iterator[Pending]:
    """Yield a run whose ranks are all stopped, or a single process that may wait for input."""
    run = window.run
    is_hanging = any(candidate.kind == KIND for candidate in candidates)
    if run.ranks and are_stopped(one.now for one in run.ranks):
        yield Pending(Candidate(KIND, 1.0, STOPPED), "paused")
    elif run.is_interactive and run.stalled > window.thresholds.stuck_floor and not is_hanging:
        yield Pending(Candidate(KIND, 1.0, "other"), "interactive")


def stall_limit(run: RunFacts, past: Past, found: Standstill, thresholds: Thresholds) -> float:
    """Return the seconds without progress after which the run hangs."""
    limits = [_planned_limit(phase, past, thresholds) for phase in _planned(run)]
    if limits:
        return max(limits)
    if found.awaited == OUTSIDE:
        least = 2.0 * thresholds.planned
    elif past.shortest_limit is not None:
        least = max(past.shortest_limit, thresholds.stuck if _may_compile(run, past, found) else 0.0)
    elif found.has_evidence:
        least = max(2.0 * thresholds.stuck_floor, _scale(run, found, thresholds))
    elif not found.has_waiting and found.rank.counters.iterations < 2.0:
        least = thresholds.planned
    else:
        least = thresholds.stuck
    return max(least, *(past.pace.get(name, 0.0) for name in (found.awaited, key(found.awaited, found.rank.rank))))


def _scale(run: RunFacts, found: Standstill, thresholds: Thresholds) -> float:
    """Return a limit from the usual step; in the first one, from the longest phase so far, up to `stuck`."""
    if usual := usual_step([one.now for one in run.ranks]):
        return EVER * usual
    one = found.rank
    before = {
        phase: seconds - (found.seconds if phase == one.phase else 0.0)
        for phase, seconds in one.counters.phases.items()
    }
    return min(EVER * max(before.get(phase, 0.0) for phase in phases.COMPUTING), thresholds.stuck)


def _may_compile(run: RunFacts, past: Past, found: Standstill) -> bool:
    """Return whether all ranks compute and none waits for another one, on the host only and not on the GPU."""
    is_working = past.idle.get(found.rank.rank, 0.0) < found.seconds / 2
    is_on_host = all((one.rate(one.spent.gpu.busy) or 0.0) < BUSY for one in run.ranks)
    return is_working and is_on_host and not found.has_waiting and found.awaited in phases.COMPUTING


def _planned(run: RunFacts) -> Collection[str]:
    return {one.now.phase for one in run.ranks} & set(phases.PLANNED)


def _planned_limit(phase: str, past: Past, thresholds: Thresholds) -> float:
    return max(thresholds.stuck, past.pace[phase]) if phase in past.pace else thresholds.planned


DETECTORS = (
    StateDetector(
        KIND,
        detect,
        is_critical=True,
        stops_run=True,
        is_one_per_run=True,
        undecided=undecided,
        explained_by=("crash",),
    ),
)
