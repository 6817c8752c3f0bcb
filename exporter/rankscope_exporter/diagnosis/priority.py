"""Which finding explains which other: one table. An explained finding is not shown and does not alert."""

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
    "low_utilization": ("cpu_fallback", "hang"),
    "hang": ("crash",),
}
"""By kind the kinds that explain it. A run that hangs loses its time to nothing else."""

EXPLAINED_BY_CAUSE: dict[str, tuple[str, str]] = {"throttling": ("straggler", "throttled")}
"""The same by kind and cause."""


def explanation(candidate: Candidate, others: Iterable[Candidate]) -> Candidate | None:
    """Return the one of the others, if any, that explains a candidate."""
    by_cause = EXPLAINED_BY_CAUSE.get(candidate.kind)
    for other in others:
        if other is candidate:
            continue
        if other.kind in EXPLAINED_BY.get(candidate.kind, ()) or (other.kind, other.cause) == by_cause:
            return other
    return None
