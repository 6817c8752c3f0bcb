"""The checks of a soak, each a function of the observations. Times are unix seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import linear_regression
from typing import Any

from testing.report import Check
from testing.report import Line as Observation
from validation.gauntlet.cases import all_cases
from validation.soak import plan

Labels = Mapping[str, str]

LATE_NOTIFICATION = 90.0  # seconds after healing in which a fault may still be notified: window and group_wait
BACK_WITHIN = 75.0  # seconds after a restart of Prometheus: a `for` of 30 s, two evaluations, and a scrape
EXPORTER_LIMIT = 120.0  # seconds for which an exporter may be down without an alert
COUNTED_BY_EXPORTER = re.compile(
    r"rankscope_(gpu|exporter|run_lost)_|"
    r"rankscope_rank_(aligned|transfer_floor|skew|blame|cpu|run_queue|workers_run_queue|read_bytes)"
)
"""Counters that restart with the exporter; all others are in the rank's record."""
EVALUATED_EVERY = 15.0
WARM_UP_SHARE = 0.25  # ratio of a process's life that is not evaluated
SHORTEST_LIFE = 20 * 60.0  # seconds: a shorter life gives no slope
MOST_GROWTH = 2 * 2**20  # bytes an hour


@dataclass
class FiringMessage:
    """A message about firing alerts, with those that are new. `is_repeated` if none is new and none has ended."""

    received: float
    alerts: list[Labels]
    is_repeated: bool = False


@dataclass
class InjectedFault:
    """One fault and the messages about it."""

    run: str
    name: str
    title: str
    onset: float
    healed: float
    place: Labels
    messages: list[FiringMessage] = field(default_factory=list)
    resolved_early: list[Labels] = field(default_factory=list)
    """Alerts that were resolved while the fault lasted."""

    @property
    def seconds(self) -> float | None:
        """Seconds from the onset to the first message; None if there was none."""
        return round(self.messages[0].received - self.onset, 1) if self.messages else None

    def explains(self, labels: Labels, when: float) -> bool:
        """Return whether the alert reports this fault."""
        return (
            self.onset <= when <= self.healed + LATE_NOTIFICATION
            and labels["alertname"] in all_cases()[self.name].alerts
            and labels.get("run", self.run) == self.run
            and self.place.items() <= labels.items()
        )


def injected_faults(faults: Iterable[Observation], healed: Iterable[Observation], end: float) -> list[InjectedFault]:
    """Return the injected faults in the order of their onset."""
    ends = {(one["run"], one["onset"]): one["time"] for one in healed}
    found = [
        InjectedFault(f["run"], f["name"], f["title"], f["onset"], ends.get((f["run"], f["onset"]), end), f["place"])
        for f in faults
    ]
    return sorted(found, key=lambda fault: fault.onset)


def messages(notifications: Sequence[Observation]) -> list[list[Observation]]:
    """Group notifications by the message that they came with."""
    return [list(group) for _, group in groupby(notifications, key=lambda one: one["received"])]


def firing_messages(notifications: Sequence[Observation]) -> list[FiringMessage]:
    """Return the messages with firing alerts. Each lists all that fires in its group, including earlier alerts."""
    found: list[FiringMessage] = []
    is_open: set[frozenset[tuple[str, str]]] = set()
    for message in messages(notifications):
        firing = [one["labels"] for one in message if one["status"] == "firing"]
        ended = [_key(one["labels"]) for one in message if one["status"] != "firing"]
        new = [labels for labels in firing if _key(labels) not in is_open]
        if new or (firing and not ended):
            found.append(FiringMessage(message[0]["received"], new or firing, is_repeated=not new))
        is_open = (is_open | {_key(labels) for labels in firing}) - set(ended)
    return found


def assign(faults: Sequence[InjectedFault], notifications: Sequence[Observation]) -> list[FiringMessage]:
    """Assign each fault the messages about it. Return the messages that no fault explains."""
    unexplained = []
    for message in firing_messages(notifications):
        explained = [f for f in faults if any(f.explains(labels, message.received) for labels in message.alerts)]
        for fault in explained:
            fault.messages.append(message)
        rest = [a for a in message.alerts if not any(f.explains(a, message.received) for f in faults)]
        if rest:
            unexplained.append(FiringMessage(message.received, rest, message.is_repeated))
    for one in notifications:
        if one["status"] != "firing":
            for fault in faults:
                if one["received"] < fault.healed and fault.explains(one["labels"], one["received"]):
                    fault.resolved_early.append(one["labels"])
    return unexplained


def none_lost(faults: Sequence[InjectedFault]) -> Check:
    """Check that every fault was notified."""
    lost = [f"{fault.title} of {fault.run}" for fault in faults if not fault.messages]
    return Check("every fault notified", not lost, _list(lost) or f"{len(faults)} of {len(faults)} faults notified")


def none_notified_twice(faults: Sequence[InjectedFault]) -> Check:
    """Check that every fault was notified by one message."""
    twice = [
        f"{f.title} of {f.run}: {len(f.messages)} messages ({differences(f)})" for f in faults if len(f.messages) > 1
    ]
    return Check("none notified twice", not twice, _list(twice) or "one message each")


def none_resolved_early(faults: Sequence[InjectedFault]) -> Check:
    """Check that no alert was resolved while its fault lasted. An XID is an event: it ends with its alert."""
    early = [f"{f.title} of {f.run}: {f.resolved_early[0]['alertname']}" for f in faults if f.resolved_early]
    return Check("none resolved while the fault lasted", not early, _list(early) or "none")


def differences(fault: InjectedFault) -> str:
    """Return the labels in which the messages about one fault differ."""
    if any(message.is_repeated for message in fault.messages):
        return "the same again"
    alerts = [labels for message in fault.messages for labels in message.alerts]
    names = sorted({name for labels in alerts for name in labels})
    differ = [name for name in names if len({labels.get(name) for labels in alerts}) > 1]
    return "differ in " + ", ".join(differ) if differ else "the same again"


def no_false_alarms(unexplained: Sequence[FiringMessage], chaos: Sequence[Observation]) -> Check:
    """Check that faults explain all alerts but those about an exporter that was down beyond its limit."""
    wrong = [
        f"{labels['alertname']} {_where(labels)}"
        for message in unexplained
        for labels in message.alerts
        if not _was_down(labels, message.received, chaos)
    ]
    return Check("no false alarms", not wrong, _list(wrong) or "none")


def counters_only_grow(history: Observation, chaos: Sequence[Observation], instances: Mapping[str, str]) -> Check:
    """Check that counters fell only where the counting process restarted. `instances` are the exporters' by run."""
    restarts = [
        (instances[one["run"]], one["began"], one["ended"])
        for one in chaos
        if one["act"] in (plan.KILL, plan.RESTART) and one["target"] == plan.EXPORTER
    ]
    wrong = [fall for fall in history["falls"] if not _has_restarted(fall, history["starts"], restarts)]
    names = sorted({f"{fall['labels']['__name__']} {_where(fall['labels'])}" for fall in wrong})
    text = f"{history['counters']} counters, {history['samples']} samples"
    text = f"{text}, {len(history['falls'])} falls, all at a start"
    return Check("counters only grow", not wrong, _list(names) or text)


def alerts_survive(history: Observation, chaos: Sequence[Observation], faults: Sequence[InjectedFault]) -> Check:
    """Check that alerts that fired before Prometheus was down fire after it, if their fault still lasts."""
    lost, kept = [], 0
    for outage in chaos:
        back = outage["ended"] + BACK_WITHIN
        for labels in outage["firing"] if outage["target"] == plan.PROMETHEUS else ():
            if not any(f.explains(labels, outage["began"]) and f.healed > back for f in faults):
                continue
            if any(start <= back <= stop + EVALUATED_EVERY for start, stop in _spans(history, labels)):
                kept += 1
            else:
                lost.append(f"{labels['alertname']} {_where(labels)}")
    return Check("alerts survive a restart", not lost, _list(lost) or f"{kept} of {kept} fired on")


def memory_is_flat(memory: Sequence[Observation]) -> Check:
    """Check that no exporter's memory grew by more than `MOST_GROWTH` an hour."""
    slopes = [life for life in lives(memory) if life["server"].startswith("exporter")]
    wrong = [life for life in slopes if life["growth"] > MOST_GROWTH]
    text = [
        f"{life['server']} {life['growth'] / 2**20:+.2f} MiB/h over {life['minutes']} min" for life in wrong or slopes
    ]
    return Check("memory flat", bool(slopes) and not wrong, _list(text) or "no process lived long enough")


def lives(memory: Sequence[Observation]) -> list[dict[str, Any]]:
    """Return the growth of each process that lived long enough, bytes an hour, by linear regression after warm-up."""
    by_process: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for one in memory:
        by_process.setdefault((one["server"], one["pid"]), []).append((one["time"], one["bytes"]))
    found = []
    for (server, pid), samples in by_process.items():
        length = samples[-1][0] - samples[0][0]
        if length < SHORTEST_LIFE:
            continue
        times, sizes = zip(*(s for s in samples if s[0] >= samples[0][0] + WARM_UP_SHARE * length), strict=True)
        growth = linear_regression([when / 3600 for when in times], sizes).slope
        found.append({"server": server, "pid": pid, "minutes": round(length / 60), "growth": growth, "last": sizes[-1]})
    return found


def a_full_directory_stops_no_job(full: Sequence[Observation]) -> Check:
    """Check that a job that started while its run directory was full trained, without a record."""
    wrong = [one["run"] for one in full if not one["trained"]]
    return Check("a full directory stops no job", not wrong, _list(wrong) or f"{len(full)} jobs trained")


def nothing_failed(errors: Sequence[Observation]) -> Check:
    """Check that the soak carried out its plan."""
    return Check("all done as planned", not errors, _list([one["error"] for one in errors]) or "yes")


def _has_restarted(
    fall: Mapping[str, Any], starts: Sequence[Mapping[str, Any]], restarts: Sequence[tuple[str, float, float]]
) -> bool:
    labels = fall["labels"]
    if COUNTED_BY_EXPORTER.match(labels["__name__"]):
        since, until = fall["before"], fall["after"]
        # A scrape may come a moment before the soak sees that the exporter answers.
        if any(labels["instance"] == where and since <= ended and began <= until for where, began, ended in restarts):
            return True
    place = {name: labels.get(name) for name in ("run", "rank")}
    return any(
        fall["before"] < seen <= fall["after"]
        for start in starts
        if place.items() <= start["labels"].items()
        for seen, _ in start["changes"][1:]
    )


def _was_down(labels: Labels, when: float, chaos: Sequence[Observation]) -> bool:
    return labels["alertname"] == "RankscopeExporterDown" and any(
        one["ended"] - one["began"] > EXPORTER_LIMIT and one["began"] < when for one in chaos
    )


def _spans(history: Observation, labels: Labels) -> list[tuple[float, float]]:
    return [tuple(span) for one in history["firing"] if one["labels"] == labels for span in one["spans"]]


def _key(labels: Labels) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def _where(labels: Labels) -> str:
    return " ".join(f"{name}={labels[name]}" for name in ("run", "rank", "gpu", "cause") if name in labels)


def _list(found: Sequence[str]) -> str:
    return "; ".join(found)
