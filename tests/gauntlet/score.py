"""What the notifications of one run are worth. The scorer knows the truth; nothing that made them did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo.webhook import Notification
from tests.gauntlet.case import Case, Target


@dataclass(frozen=True)
class Verdict:
    """On one fault. The first notification that may tell it counts."""

    fired: bool
    place_right: bool = False
    cause_right: bool = False
    seconds: float | None = None
    """From the onset to the webhook; None if nothing came."""
    labels: dict[str, str] | None = None

    def line(self) -> dict[str, Any]:
        """As the ledger has it."""
        return {**vars(self), "seconds": None if self.seconds is None else round(self.seconds, 2)}


def judge(case: Case, target: Target, onset: float, notifications: Iterable[Notification]) -> Verdict:
    """Whether the fault was told, where and why. `onset` is unix time."""
    told = next((n for n in notifications if n.is_firing and n.name in case.alerts and n.received >= onset), None)
    if told is None:
        return Verdict(fired=False)
    causes = case.alerts[told.name]
    return Verdict(
        fired=True,
        place_right=case.place(target).items() <= told.labels.items(),
        cause_right=not causes or told.labels.get("cause") in causes,
        seconds=told.received - onset,
        labels=told.labels,
    )


def false_alarms(faults: Sequence[tuple[Case, Target]], notifications: Iterable[Notification]) -> list[dict[str, str]]:
    """The labels of all that was notified and is none of the faults' own alerts, each once."""
    own = {name for case, _ in faults for name in case.alerts}
    strange = [n.labels for n in notifications if n.is_firing and n.name not in own]
    return [labels for index, labels in enumerate(strange) if labels not in strange[:index]]
