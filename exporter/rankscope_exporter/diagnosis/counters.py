"""The increase of counters between two readings."""

from __future__ import annotations


def increase(now: float | None, then: float | None) -> float | None:
    """Return the increase; None if either value is unknown. A counter that has decreased began again at 0."""
    if now is None or then is None:
        return None
    return now - then if now >= then else now
