"""The score of one run's notifications against the faults that were injected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from testing.webhook import Notification
from validation.gauntlet.case import Case, Target


@dataclass(frozen=True)
class Verdict:
    """The verdict on one fault, by the first notification that may report it."""

    fired: bool
    place_right: bool = False
    cause_right: bool = False
    seconds: float | None = None
    """Seconds from the onset to the webhook; None if nothing came."""
    labels: dict[str, str] | None = None

    def line(self) -> dict[str, Any]:
        """Return the verdict as the ledger has it."""
        return {**vars(self), "seconds": None if self.seconds is None else round(self.seconds, 2)}


def judge(case: Case, target: Target, onset: float, notifications: Iterable[Notification]) -> Verdict:
    """Return whether the fault was notified, with which place and cause. `onset` is unix time."""
    first = next((n for n in notifications if n.is_firing and n.name in case.alerts and n.received >= onset), None)
    if first is None:
        return Verdict(fired=False)
    causes = case.alerts[first.name]
    return Verdict(
        fired=True,
        place_right=case.place(target).items() <= first.labels.items(),
        cause_right=not causes or first.labels.get("cause") in causes,
        seconds=first.received - onset,
        labels=first.labels,
    )


def false_alarms(faults: Sequence[tuple[Case, Target]], notifications: Iterable[Notification]) -> list[dict[str, str]]:
    """Return the labels of each alert that reports none of the faults in its place, once.

    The first of a fault's own alerts is not among them: if its place is wrong, the verdict says so.
    """
    firing: list[dict[str, str]] = []
    for notification in notifications:
        if notification.is_firing and notification.labels not in firing:
            firing.append(notification.labels)
    judged = [next((labels for labels in firing if labels["alertname"] in case.alerts), None) for case, _ in faults]
    return [a for a in firing if a not in judged and not any(_reports(a, *fault) for fault in faults)]


def _reports(labels: dict[str, str], case: Case, target: Target) -> bool:
    return labels["alertname"] in case.alerts and case.place(target).items() <= labels.items()
