"""What must hold of a soak, each as a function of what was observed. Times are unix seconds."""

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

TOLD_LATE = 90.0  # seconds after healing in which what was already seen may still be told: window and group_wait
BACK_WITHIN = 75.0  # seconds after a restart of Prometheus: a `for` of 30 s, two evaluations, and a scrape
EXPORTER_LIMIT = 120.0  # seconds that one may be down in silence
COUNTED_BY_EXPORTER = re.compile(
    r"rankscope_(gpu|exporter)_|"
    r"rankscope_rank_(aligned|transfer_floor|skew|blame|cpu|run_queue|workers_run_queue|read_bytes)"
)
"""What begins anew with the exporter; all else is counted in the rank's record."""
EVALUATED_EVERY = 15.0
WARM_UP_SHARE = 0.25  # of a process's life, which does not count
SHORTEST_LIFE = 20 * 60.0  # seconds, of which a slope can be told
MOST_GROWTH = 2 * 2**20  # bytes an hour


@dataclass
class Telling:
    """A message that told of alerts that were not told already; or `is_repeated` one that told nothing new."""

    received: float
    alerts: list[Labels]
    is_repeated: bool = False


@dataclass
class Story:
    """One fault and what was told of it."""

    run: str
    name: str
    title: str
    onset: float
    healed: float
    place: Labels
    told: list[Telling] = field(default_factory=list)
    ended_early: list[Labels] = field(default_factory=list)
    """Alerts whose end was told while the fault held."""

    @property
    def seconds(self) -> float | None:
        """From the onset to the first message; None if there was none."""
        return round(self.told[0].received - self.onset, 1) if self.told else None

    def explains(self, labels: Labels, when: float) -> bool:
        """Whether an alert tells this fault."""
        return (
            self.onset <= when <= self.healed + TOLD_LATE
            and labels["alertname"] in all_cases()[self.name].alerts
            and labels.get("run", self.run) == self.run
            and self.place.items() <= labels.items()
        )


def stories(faults: Iterable[Observation], healed: Iterable[Observation], end: float) -> list[Story]:
    """The faults that were injected, in the order of their onset."""
    ends = {(one["run"], one["onset"]): one["time"] for one in healed}
    found = [
        Story(f["run"], f["name"], f["title"], f["onset"], ends.get((f["run"], f["onset"]), end), f["place"])
        for f in faults
    ]
    return sorted(found, key=lambda story: story.onset)


def messages(told: Sequence[Observation]) -> list[list[Observation]]:
    """Notifications by the message that they came with."""
    return [list(group) for _, group in groupby(told, key=lambda one: one["received"])]


def tellings(told: Sequence[Observation]) -> list[Telling]:
    """Messages that say that something fires.

    A message lists all that fires in its group, also what was told before: it tells what is new, and repeats if
    nothing is new and nothing has ended.
    """
    found: list[Telling] = []
    is_open: set[frozenset[tuple[str, str]]] = set()
    for message in messages(told):
        firing = [one["labels"] for one in message if one["status"] == "firing"]
        ended = [_key(one["labels"]) for one in message if one["status"] != "firing"]
        new = [labels for labels in firing if _key(labels) not in is_open]
        if new or (firing and not ended):
            found.append(Telling(message[0]["received"], new or firing, is_repeated=not new))
        is_open = (is_open | {_key(labels) for labels in firing}) - set(ended)
    return found


def assign(faults: Sequence[Story], told: Sequence[Observation]) -> list[Telling]:
    """Gives each story what tells it; returns what tells none."""
    strange = []
    for telling in tellings(told):
        explained = [s for s in faults if any(s.explains(labels, telling.received) for labels in telling.alerts)]
        for story in explained:
            story.told.append(telling)
        rest = [a for a in telling.alerts if not any(s.explains(a, telling.received) for s in faults)]
        if rest:
            strange.append(Telling(telling.received, rest, telling.is_repeated))
    for one in told:
        if one["status"] != "firing":
            for story in faults:
                if one["received"] < story.healed and story.explains(one["labels"], one["received"]):
                    story.ended_early.append(one["labels"])
    return strange


def none_lost(faults: Sequence[Story]) -> Check:
    """Every fault was told."""
    lost = [f"{story.title} of {story.run}" for story in faults if not story.told]
    return Check("none lost", not lost, _list(lost) or f"{len(faults)} of {len(faults)} faults told")


def none_told_twice(faults: Sequence[Story]) -> Check:
    """Every fault was told by one message, and its end by none while it held."""
    twice = [f"{s.title} of {s.run}: {len(s.told)} messages ({differences(s)})" for s in faults if len(s.told) > 1]
    return Check("none told twice", not twice, _list(twice) or "one message each")


def none_ended_early(faults: Sequence[Story]) -> Check:
    """No end was told of a fault that still held. An XID is an event, and has no other end than its alert's."""
    early = [f"{s.title} of {s.run}: {s.ended_early[0]['alertname']}" for s in faults if s.ended_early]
    return Check("no end told while it held", not early, _list(early) or "none")


def differences(story: Story) -> str:
    """In which labels the alerts of several messages about one fault differ."""
    if any(telling.is_repeated for telling in story.told):
        return "the same again"
    alerts = [labels for telling in story.told for labels in telling.alerts]
    names = sorted({name for labels in alerts for name in labels})
    differ = [name for name in names if len({labels.get(name) for labels in alerts}) > 1]
    return "differ in " + ", ".join(differ) if differ else "the same again"


def no_false_alarms(strange: Sequence[Telling], chaos: Sequence[Observation]) -> Check:
    """Nothing was told that no fault explains. An exporter that was down for longer than its limit is told rightly."""
    wrong = [
        f"{labels['alertname']} {_where(labels)}"
        for telling in strange
        for labels in telling.alerts
        if not _was_down(labels, telling.received, chaos)
    ]
    return Check("no false alarms", not wrong, _list(wrong) or "none")


def counters_only_grow(history: Observation, chaos: Sequence[Observation], instances: Mapping[str, str]) -> Check:
    """Counters fell only where the process that counts began anew. `instances` are the exporters' by run."""
    restarts = [
        (instances[one["run"]], one["ended"])
        for one in chaos
        if one["act"] in (plan.KILL, plan.RESTART) and one["target"] == plan.EXPORTER
    ]
    wrong = [fall for fall in history["falls"] if not _began_anew(fall, history["starts"], restarts)]
    names = sorted({f"{fall['labels']['__name__']} {_where(fall['labels'])}" for fall in wrong})
    said = (
        f"{history['counters']} counters, {history['samples']} samples, {len(history['falls'])} falls, all at a start"
    )
    return Check("counters only grow", not wrong, _list(names) or said)


def alerts_survive(history: Observation, chaos: Sequence[Observation], faults: Sequence[Story]) -> Check:
    """What fired before Prometheus was down fires after it, if its fault still holds by then."""
    lost, kept = [], 0
    for outage in chaos:
        back = outage["ended"] + BACK_WITHIN
        for labels in outage["firing"] if outage["target"] == plan.PROMETHEUS else ():
            if not any(s.explains(labels, outage["began"]) and s.healed > back for s in faults):
                continue
            if any(start <= back <= stop + EVALUATED_EVERY for start, stop in _spans(history, labels)):
                kept += 1
            else:
                lost.append(f"{labels['alertname']} {_where(labels)}")
    return Check("alerts survive a restart", not lost, _list(lost) or f"{kept} of {kept} fired on")


def memory_is_flat(memory: Sequence[Observation]) -> Check:
    """No exporter's memory grew by more than `MOST_GROWTH` an hour."""
    slopes = [life for life in lives(memory) if life["server"].startswith("exporter")]
    wrong = [life for life in slopes if life["growth"] > MOST_GROWTH]
    text = [
        f"{life['server']} {life['growth'] / 2**20:+.2f} MiB/h over {life['minutes']} min" for life in wrong or slopes
    ]
    return Check("memory flat", bool(slopes) and not wrong, _list(text) or "no process lived long enough")


def lives(memory: Sequence[Observation]) -> list[dict[str, Any]]:
    """Of each process that lived long enough: bytes an hour, by a line through what it had after its warm-up."""
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
    """A job that began while its run directory was full trained all the same, without a record."""
    wrong = [one["run"] for one in full if not one["trained"]]
    return Check("a full directory stops no job", not wrong, _list(wrong) or f"{len(full)} jobs trained")


def nothing_failed(errors: Sequence[Observation]) -> Check:
    """The soak itself did what it had planned."""
    return Check("all done as planned", not errors, _list([one["error"] for one in errors]) or "yes")


def _began_anew(
    fall: Mapping[str, Any], starts: Sequence[Mapping[str, Any]], restarts: Sequence[tuple[str, float]]
) -> bool:
    labels = fall["labels"]
    if COUNTED_BY_EXPORTER.match(labels["__name__"]):
        since, until = fall["before"], fall["after"]
        if any(labels["instance"] == instance and since <= when <= until for instance, when in restarts):
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
