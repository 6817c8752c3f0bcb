"""A run in which no rank makes progress, and the rank that the others wait for.

The run has to stand still for several times as long as it ever did in the last hour. The rank is one that the others
wait for, directly or through others, and that waits for nobody: in a collective a rank waits for those of its group
that have issued fewer (`diagnosis/waits.py`). Else it is one that is in no collective; where the device waits and not
the host (CUDA, NCCL), a rank that has issued as many as the others is in one while its host waits for the device, be it
in a place that no probe knows. If all are in a collective, nothing tells them apart, and the one that has waited
longest stands for all (cause `inside_collective`).

A single process that waits in no phase of its own pauses (a prompt, a notebook): no rank waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from rankscope.record import phases
from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.diagnosis.waits import Operation, Position, held_up_by, waits

KIND = "hang"
INSIDE = "inside_collective"
Issued = Mapping[str, Mapping[int, float]]
"""Collectives by group and rank."""
SHOWN_FROM = 5.0  # seconds without progress: sooner than an alert, for people who look


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the hang: from its first seconds on, in planned phases from half of the time that they may take."""
    run, behind = window.run, ranks_behind(window.run)
    needed = patience(run, past, window.thresholds, has_evidence=bool(behind))
    shown_from = needed / 2 if _planned(run) else min(needed, max(SHOWN_FROM, 2.0 * (past.longest_pause or 0.0)))
    if not run.ranks or run.stalled < shown_from or is_interactive(run):
        return
    one, cause = _culprit(run, behind)
    evidence = {"stalled": one.stalled, "behind": float(behind.get(one.rank, 0.0)), "ranks_behind": float(len(behind))}
    yield Candidate(KIND, 1.0, cause, place(one), evidence, lasted=run.stalled, needed=needed)


def is_interactive(run: RunFacts) -> bool:
    """Return whether it is a single process in no phase that has a name."""
    return len(run.ranks) == 1 and run.ranks[0].now.phase == "other"


def patience(run: RunFacts, past: Past, thresholds: Thresholds, *, has_evidence: bool) -> float:
    """Return the seconds without progress after which the run hangs."""
    if planned := _planned(run):
        return max(_planned_patience(past.longest_planned_pauses.get(phase), phase, thresholds) for phase in planned)
    if past.longest_pause is None:
        return thresholds.stuck_early if has_evidence else thresholds.stuck
    return min(max(thresholds.stuck_pace * past.longest_pause, thresholds.stuck_floor), thresholds.stuck)


def _planned(run: RunFacts) -> set[str]:
    return {one.now.phase for one in run.ranks} & set(phases.PLANNED)


def _planned_patience(pace: float | None, phase: str, thresholds: Thresholds) -> float:
    """How long a start-up takes says nothing about the next."""
    if pace is None or phase == "startup":
        return thresholds.planned
    return min(max(thresholds.stuck_pace * pace, thresholds.stuck), thresholds.planned)


def ranks_behind(run: RunFacts) -> dict[int, float]:
    """Return the ranks that the others wait for in the end, and how many collectives each lacks of one group."""
    issued: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.ranks:
        for group, count in one.now.issued.items():
            issued[group][one.rank] = count
    # A rank that is in no collective may have one in flight; it does not wait for that, if others wait for it.
    late = _held_up_by(run, issued, _is_waiting) or _held_up_by(run, issued, lambda _: True)
    lacking = {
        rank: [max(counts.values()) - counts[rank] for counts in issued.values() if rank in counts] for rank in late
    }
    return {rank: max(counts) for rank, counts in lacking.items() if max(counts) > 0.0}


def _held_up_by(run: RunFacts, issued: Issued, is_waiting: Callable[[RankFacts], bool]) -> set[int]:
    positions = [
        Position(one.rank, one.now.issued, waits_in=_operation(one, issued) if is_waiting(one) else None)
        for one in run.ranks
    ]
    waiting = waits(positions, {group: list(counts) for group, counts in issued.items()})
    return {rank for ranks in held_up_by(waiting) if len(ranks) == 1 for rank in ranks}


def _operation(one: RankFacts, issued: Issued) -> Operation | None:
    """Return the collective that a rank is in. Where that is not known it is one that another rank has not issued."""
    lacking = (name for name, count in one.now.issued.items() if count > min(issued[name].values()))
    group = one.now.collective or next(lacking, "")
    count = one.now.issued.get(group)
    return None if count is None else Operation("", group, count)


def _is_waiting(one: RankFacts) -> bool:
    return one.now.phase == WAIT or _waits_for_the_device(one)


def _culprit(run: RunFacts, behind: dict[int, float]) -> tuple[RankFacts, str]:
    candidates: Sequence[RankFacts] = [one for one in run.ranks if one.rank in behind]
    candidates = candidates or [one for one in run.ranks if not _is_in_a_collective(run, one)]
    if candidates:
        one = max(candidates, key=lambda one: one.stalled)
        return one, one.now.phase
    return max(run.ranks, key=lambda one: one.stalled), INSIDE


def _is_in_a_collective(run: RunFacts, one: RankFacts) -> bool:
    return one.now.phase == WAIT or (_waits_for_the_device(one) and len(run.ranks) > 1)


def _waits_for_the_device(one: RankFacts) -> bool:
    now = one.now
    return now.phase in ("device_wait", "other") and now.counters.device_steps > 0 and bool(now.issued)


DETECTOR = StateDetector((KIND,), detect, is_critical=True)
