"""The result of one check, and its line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["failed", "in_use", "warning", "not_run", "ok"]
LABELS: dict[Outcome, str] = {"failed": "FAILED", "in_use": "IN USE", "warning": "WARNING"}


@dataclass(frozen=True)
class Result:
    """One check of one place. An unknown value is `not_run`, with the reason in `measured`, and never fails."""

    check: str
    outcome: Outcome
    measured: str = ""
    expected: str = ""
    advice: str = ""
    """What to do, as an imperative; only if something is wrong."""
    gpu: int | None = None
    """Index of the GPU; None for the node."""
    uuid: str = ""

    @property
    def place(self) -> str:
        """Return the GPU with its UUID, or the node."""
        return "node" if self.gpu is None else f"GPU {self.gpu}" + (f" ({self.uuid})" if self.uuid else "")

    @property
    def line(self) -> str:
        """Return what is wrong, where, measured and expected, and what to do."""
        label = LABELS.get(self.outcome, self.outcome)
        expected = f"; expected: {self.expected}" if self.expected else ""
        advice = f". {self.advice}." if self.advice else ""
        return f"{label:7} {self.place}: {self.check}: {self.measured}{expected}{advice}"
