"""What the notifications of one run are worth. The scorer knows the truth; nothing that made them did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from testing.webhook import Notification
from validation.gauntlet.case import Case, Target


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
    """The labels of all that was notified and tells none of the faults in its place, each once.

    The first of a fault's own alerts is not among them: if its place is wrong, the verdict says so.
    """
    told: list[dict[str, str]] = []
    for notification in notifications:
        if notification.is_firing and notification.labels not in told:
            told.append(notification.labels)
    judged = [next((labels for labels in told if labels["alertname"] in case.alerts), None) for case, _ in faults]
    return [labels for labels in told if labels not in judged and not any(_tells(labels, *fault) for fault in faults)]


def _tells(labels: dict[str, str], case: Case, target: Target) -> bool:
    return labels["alertname"] in case.alerts and case.place(target).items() <= labels.items()
