"""Earlier values of counters, for rates over the last seconds."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Moment(NamedTuple, Generic[T]):
    """A value and its time."""

    at: float
    value: T


class Recent(Generic[T]):
    """Two values at least `seconds` apart, so that the older one is between one and two times `seconds` old."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: tuple[Moment[T], ...] = ()

    def add(self, at: float, value: T) -> None:
        """Keep the value if the last kept one is old enough."""
        if not self._kept or at - self._kept[-1].at >= self._seconds:
            self._kept = (*self._kept[-1:], Moment(at, value))

    @property
    def oldest(self) -> Moment[T]:
        """Return the older value. Raise IndexError before the first one."""
        return self._kept[0]
