"""A clock for tests."""

from __future__ import annotations


class Clock:
    """A callable clock whose time changes only when the test changes it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
