"""Reports of findings and pending candidates, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.record.quantities import duration
from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.findings import Candidate, Finding, Pending, Place
from rankscope_exporter.diagnosis.readings import Run, run_title
from rankscope_exporter.diagnosis.standstill import STOPPED

LACKS: Mapping[str, str] = {
    "time": "it has not lasted long enough",
    "startup": "it may still load data, index or compile",
    "steps": "too few steps have been compared",
    "baseline": "the run is too young to have a baseline",
    "paused": "suspended by a scheduler, SIGSTOP, a debugger or a frozen cgroup; this does not alert",
    "interactive": "a single process outside of training steps, such as a notebook, does not alert",
    "explained": "another finding explains it",
    "usual": "many runs have it from their start; an increase alerts",
}
"""Reasons why a candidate is not a finding."""


@dataclass(frozen=True)
class FindingReport:
    """A finding. Its place is empty (None for the rank, no ranks) if it concerns the whole run."""

    kind: str
    cause: str
    severity: str
    ratio: float
    rank: int | None
    """Empty for a set of ranks."""
    ranks: tuple[int, ...]
    group: str
    node: str
    gpu: str
    uuid: str
    port: str
    place: str
    """The place that has these ranks and no other, such as `node node-a`, `GPU 3` or `context 3`."""
    since: float
    """The unix time when it began."""
    age_seconds: float
    evidence: Mapping[str, float]
    sentence: str
    advice: str


@dataclass(frozen=True)
class PendingReport:
    """A candidate that is not a finding, and the reason."""

    kind: str
    cause: str
    ratio: float
    rank: int | None
    node: str
    gpu: str
    lacks: str
    """A key of LACKS."""
    reason: str
    remaining_seconds: float | None
    """Seconds until it is a finding if it lasts; None if unknown."""
    sentence: str
    ranks: tuple[int, ...] = ()
    place: str = ""


def report_finding(run: Run, finding: Finding, at: float, unix: float) -> FindingReport:
    """Return the report of a finding at a time, which is given on both clocks."""
    candidate, place = finding.candidate, finding.candidate.place
    age = max(at - finding.since, 0.0)
    return FindingReport(
        kind=candidate.kind,
        cause=candidate.cause,
        severity=finding.severity,
        ratio=candidate.ratio,
        rank=place.rank,
        ranks=_ranks(place),
        group=place.group,
        node=place.node,
        gpu=place.gpu,
        uuid=place.uuid,
        port=place.port,
        place=place.place,
        since=unix - age,
        age_seconds=age,
        evidence=dict(candidate.evidence),
        sentence=words.sentence(run, candidate),
        advice=words.advice(candidate),
    )


def report_pending(run: Run, pending: Pending) -> PendingReport:
    """Return the report of a pending candidate."""
    candidate, place = pending.candidate, pending.candidate.place
    return PendingReport(
        kind=candidate.kind,
        cause=candidate.cause,
        ratio=candidate.ratio,
        rank=place.rank,
        ranks=_ranks(place),
        node=place.node,
        gpu=place.gpu,
        place=place.place,
        lacks=pending.lacks,
        reason=LACKS.get(pending.lacks, pending.lacks),
        remaining_seconds=None if pending.remaining is None else max(pending.remaining, 0.0),
        sentence=_pending_sentence(run, candidate),
    )


def _ranks(place: Place) -> tuple[int, ...]:
    return place.ranks if place.rank is None else (place.rank,)


def _pending_sentence(run: Run, candidate: Candidate) -> str:
    """Return what may become a finding. A start-up that is not one yet, or a stopped run, is not called a hang."""
    if candidate.kind == "hang" and candidate.cause == STOPPED and candidate.place.rank is None:
        return f"All processes of run {run_title(run)} are stopped"
    if candidate.kind == "hang" and candidate.place.rank is None:
        return f"Run {run_title(run)} makes no steps"
    if candidate.kind == "hang" and candidate.cause == "startup" and candidate.evidence.get("ranks_behind"):
        return f"The other ranks of run {run[0]} wait for r{words.where(candidate)[1:]} in its start-up"
    return words.sentence(run, candidate)


def pending_reason(pending: PendingReport) -> str:
    """Return the reason why it is not a finding, and the remaining time if known."""
    if pending.remaining_seconds is None:
        return pending.reason
    return f"{pending.reason}, {duration(pending.remaining_seconds)} more"
