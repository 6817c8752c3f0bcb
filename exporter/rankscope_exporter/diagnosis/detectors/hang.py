"""A run in which no rank makes progress, and the rank that the others wait for.

The run has to stand still for several times as long as it ever did in the last hour. The rank is one that has issued
fewer collectives than another of a group, and in no group more: the others wait for it. Else it is one that is in no
collective; where the device waits and not the host (CUDA, NCCL), a rank that has issued as many as the others is in one
while its host waits for the device, be it in a place that no probe knows. If all are in a collective, nothing tells
them apart, and the one that has waited longest stands for all (cause `inside_collective`).

A single process that waits in no phase of its own pauses (a prompt, a notebook): no rank waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rankscope.record import phases
from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "hang"
INSIDE = "inside_collective"
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
    """Return the ranks that lack collectives that others of a group have issued, and are ahead in no group."""
    issued: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.ranks:
        for group, count in one.now.issued.items():
            issued[group][one.rank] = count
    lacking: dict[int, float] = {}
    ahead = set[int]()
    for counts in issued.values():
        most, least = max(counts.values()), min(counts.values())
        for rank, count in counts.items():
            if count < most:
                lacking[rank] = max(lacking.get(rank, 0.0), most - count)
            if count > least:
                ahead.add(rank)
    return {rank: lack for rank, lack in lacking.items() if rank not in ahead}


def _culprit(run: RunFacts, behind: dict[int, float]) -> tuple[RankFacts, str]:
    candidates: Sequence[RankFacts] = [one for one in run.ranks if one.rank in behind]
    candidates = candidates or [one for one in run.ranks if not _is_in_a_collective(run, one)]
    if candidates:
        one = max(candidates, key=lambda one: one.stalled)
        return one, one.now.phase
    return max(run.ranks, key=lambda one: one.stalled), INSIDE


def _is_in_a_collective(run: RunFacts, one: RankFacts) -> bool:
    now = one.now
    if now.phase == WAIT:
        return True
    is_device_waiting = now.phase in ("device_wait", "other") and now.counters.device_steps > 0 and bool(now.issued)
    return is_device_waiting and len(run.ranks) > 1
