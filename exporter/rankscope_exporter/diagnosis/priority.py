"""Findings that explain other findings. An explained finding is not shown and does not alert."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope_exporter.diagnosis.detectors import DETECTORS, LOSSES, STATES
from rankscope_exporter.diagnosis.detectors.loss import KindAndCause
from rankscope_exporter.diagnosis.findings import Candidate

STANDSTILLS = tuple(one.kind for one in STATES if one.stops_run)
EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    **{one.kind: (*one.explained_by, *STANDSTILLS) for one in LOSSES},
    **{one.kind: one.explained_by for one in STATES if one.explained_by},
}
"""By kind: the kinds that explain it. A run that makes no progress has no other losses."""

EXPLAINED_BY_CAUSE: dict[KindAndCause, KindAndCause] = {
    (one.kind, cause): by for one in DETECTORS for cause, by in one.explained_by_cause
}
"""By kind and cause: the kind and cause that explain it. An empty cause stands for any cause."""


def explanation(candidate: Candidate, others: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate among the others that explains this one, or None."""
    return next((other for other in others if other is not candidate and _explains(other, candidate)), None)


def _explains(other: Candidate, candidate: Candidate) -> bool:
    if other.kind in EXPLAINED_BY.get(candidate.kind, ()):
        return True
    return any(_matches(candidate, one) and _matches(other, by) for one, by in EXPLAINED_BY_CAUSE.items())


def _matches(candidate: Candidate, of: KindAndCause) -> bool:
    return candidate.kind == of[0] and of[1] in ("", candidate.cause)
