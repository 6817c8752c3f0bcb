"""A value of some seconds ago, kept so that a rate over the last seconds can be had of counters."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Moment(NamedTuple, Generic[T]):
    """A value and when it was."""

    at: float
    value: T


class Recent(Generic[T]):
    """Keeps two values, `seconds` apart or more, so that the older one is from once to twice as long ago."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: tuple[Moment[T], ...] = ()

    def add(self, at: float, value: T) -> None:
        """Keep the value if the last one that is kept is old enough."""
        if not self._kept or at - self._kept[-1].at >= self._seconds:
            self._kept = (*self._kept[-1:], Moment(at, value))

    @property
    def oldest(self) -> Moment[T]:
        """Return the older value. Raises IndexError before the first one."""
        return self._kept[0]
