"""The table of findings that explain other findings. An explained finding is not shown and does not alert."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope_exporter.diagnosis.findings import Candidate

EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    "straggler": ("hang",),
    "rotating_straggler": ("straggler", "hang"),
    "data": ("hang",),
    "network": ("hang",),
    "small_collectives": ("straggler", "hang"),
    "copies": ("hang",),
    "launch": ("straggler", "hang"),
    "device_reads": ("straggler", "hang"),
    "throttling": ("hang",),
    "low_utilization": ("cpu_fallback", "launch", "device_reads", "hang"),
    "slow_startup": ("loss_scale_collapse", "hang"),
    "stage_imbalance": ("hang",),
    "bubble": ("hang",),
    "cpu_fallback": ("hang",),
    "hang": ("crash",),
}
"""By kind: the kinds that explain it. A run that hangs has no other losses."""

KindAndCause = tuple[str, str]
EXPLAINED_BY_CAUSE: dict[KindAndCause, KindAndCause] = {
    ("throttling", ""): ("straggler", "throttled"),
    ("straggler", "data_wait"): ("data", ""),
    ("rotating_straggler", "data_wait"): ("data", ""),
    ("network", ""): ("straggler", "aggregation"),
}
"""By kind and cause: the kind and cause that explain it. An empty cause stands for any cause.

If all data is late, one of the ranks is the last by chance, or several are in turn. Data that a rank aggregates uses
the network as well."""


def explanation(candidate: Candidate, others: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate among the others that explains this one, or None."""
    return next((other for other in others if other is not candidate and _explains(other, candidate)), None)


def _explains(other: Candidate, candidate: Candidate) -> bool:
    if other.kind in EXPLAINED_BY.get(candidate.kind, ()):
        return True
    return any(_matches(candidate, one) and _matches(other, by) for one, by in EXPLAINED_BY_CAUSE.items())


def _matches(candidate: Candidate, of: KindAndCause) -> bool:
    return candidate.kind == of[0] and of[1] in ("", candidate.cause)
