"""The parts of nodes that the history is kept of, and its file: a line of JSON for each part.

A part is a GPU, or a network port or a node by name. A GPU is known by its UUID: a replaced one has no past, and a
moved one keeps it. A part keeps a limited number of findings. If there are more, the owner with the most of them loses
the oldest one, findings without evidence first: no user displaces the findings of others.
"""

from __future__ import annotations

import errno
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankscope_exporter.diagnosis.saved import UNREADABLE, Time, restored, rounded, saved
from rankscope_exporter.ledger.blame import SLOW
from rankscope_exporter.ledger.owner_files import ANALYZER_SCALE, HISTORY_LIMIT, read_lines
from rankscope_exporter.ranks.principals import principal_of

FILE, VERSION = "history.jsonl", 1
DAY = 86_400.0
KEPT_DAYS, WEEK = 35, 7 * DAY
INCIDENTS_LIMIT, EVENTS_LIMIT = 64, 24
"""The most findings of a part, and kinds of events of a day."""


@dataclass(eq=False)
class Incident:
    """A finding of a run that named the part. Times are unix times."""

    run: str
    owner: str
    training: str
    start: int
    """The second in which the run's account began, which no change of the clock changes."""
    kind: str
    cause: str
    rank: str
    node: str
    gpu: str
    """The GPU's index at that time."""
    began: Time
    ended: Time
    """The last time at which it was open."""
    gpu_seconds: float = 0.0
    """The GPU time that the run has lost to it."""
    evidence: str = ""
    """The evidence against the hardware (`ledger/blame.py`); empty if there is none."""

    @property
    def of_run(self) -> tuple[object, ...]:
        """Return what identifies its run."""
        return self.run, self.owner, self.training, self.start

    @property
    def key(self) -> tuple[object, ...]:
        """Return what identifies it."""
        return *self.of_run, self.kind, self.cause, self.rank

    @property
    def is_blamed(self) -> bool:
        """Return whether it counts against the hardware by itself."""
        return self.evidence not in ("", SLOW)


@dataclass(eq=False)
class Day:
    """The events of a day that the driver and the kernel reported."""

    at: Time
    """The time of its first event."""
    events: dict[str, float]
    """Numbers of `xid N` and `ecc` (uncorrected errors); seconds of `throttled`, `link`, `lost` and `port REASON`."""


@dataclass
class Part:
    """A GPU, a network port or a node, with its history."""

    node: str
    gpu: str = ""
    """The GPU's index when it was last seen."""
    uuid: str = ""
    port: str = ""
    incidents: tuple[Incident, ...] = ()
    days: tuple[Day, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Return what identifies it."""
        return ("", self.uuid) if self.uuid else (self.node, self.port)

    @property
    def newest(self) -> float:
        """Return when something last happened to it."""
        return max((*(one.ended for one in self.incidents), *(day.at for day in self.days)), default=-math.inf)

    def add(self, incident: Incident) -> None:
        """Add a finding."""
        kept = [*self.incidents, incident]
        if len(kept) > INCIDENTS_LIMIT:
            weights = {id(one): one.is_blamed + bool(one.evidence) for one in kept}
            lightest = [one for one in kept if weights[id(one)] == min(weights.values())]
            owners = Counter(principal_of(one.owner) for one in lightest)
            kept.remove(min(lightest, key=lambda one: (-owners[principal_of(one.owner)], one.ended)))
        self.incidents = tuple(kept)

    def count(self, event: str, number: float, now: float) -> Day:
        """Add to an event of this day. Return the day."""
        if not self.days or not 0.0 <= now - self.days[-1].at < DAY:
            self.days = (*self.days, Day(now, {}))[-KEPT_DAYS:]
        day = self.days[-1]
        if event in day.events or len(day.events) < EVENTS_LIMIT:
            day.events[event] = rounded(day.events.get(event, 0.0) + number)
        return day

    def forget(self, now: float) -> None:
        """Forget what is too old, and move what is in the future, of a clock that was wrong, to now."""
        oldest = now - KEPT_DAYS * DAY
        self.incidents = tuple(one for one in self.incidents if one.ended >= oldest)
        self.days = tuple(day for day in self.days if day.at >= oldest)
        for incident in self.incidents:
            incident.began, incident.ended = min(incident.began, now), min(incident.ended, now)
        for day in self.days:
            day.at = min(day.at, now)


def culprit_runs(part: Part, parts: Collection[Part], since: float) -> int:
    """Return the number of runs since then in which a GPU was the culprit.

    Of the runs in which it was only slow, those of the same rank count once. They count if it was slow as at least two
    ranks, and as more than all other GPUs of its node together: else it may be the work that a script has for a rank.
    """
    blamed = {one.of_run for one in part.incidents if one.is_blamed and one.ended >= since}
    slow = len(_slow_ranks(part, since))
    others = sum(
        len(_slow_ranks(one, since)) for one in parts if one is not part and one.uuid and one.node == part.node
    )
    return len(blamed) + (slow if slow > max(others, 1) else 0)


def _slow_ranks(part: Part, since: float) -> set[str]:
    blamed = {one.of_run for one in part.incidents if one.is_blamed}
    slow = (one for one in part.incidents if one.ended >= since and one.evidence == SLOW)
    return {one.rank for one in slow if one.of_run not in blamed}


def read(directory: Path) -> Iterator[Part]:
    """Yield the parts in the state directory, without those that are damaged. Raise OSError, also if all are."""
    is_readable = not (directory / FILE).lstat().st_size
    for state in read_lines(directory / FILE, ANALYZER_SCALE * HISTORY_LIMIT):
        with suppress(*UNREADABLE):
            if state["version"] == VERSION:
                yield restored(Part, state["part"], float(state["at"]))
                is_readable = True
    if not is_readable:
        raise OSError(errno.EBADMSG, "no entry can be read: the file is damaged, or of another version")


def text_of(parts: Iterable[Part], now: float, limit: int) -> bytes:
    """Return the file, with as many parts as fit; those first to which something happened last."""
    text = b""
    for part in sorted(parts, key=lambda part: part.newest, reverse=True):
        line = {"version": VERSION, "at": now, "part": saved(Part, part, now)}
        text_of_part = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(text) + len(text_of_part) > limit:
            break
        text += text_of_part
    return text
