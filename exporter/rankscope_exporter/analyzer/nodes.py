"""The state of one node: the moments that its exporter has sent and that are not judged yet, and its clock.

The offset between the two monotonic clocks lies between the time of the request and that of the answer. The wall clocks
of the nodes do not matter. A process keeps the start that it was first given, so that a better offset is not a restart.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import NamedTuple

from rankscope_exporter.analyzer.alignment import Process
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.node_facts.wire import Answer, Gpus, Moment, SentRank, step_of
from rankscope_exporter.ranks.chosen_steps import AnyStep

KEPT_MOMENTS, KEPT_BYTES = 120, 8 * 2**20
"""The most moments of a node that are not judged yet, and their bytes as JSON: they take about seven times as much."""
LOCAL = re.compile(r"(localhost|127\.|::1|0\.0\.0\.0)")
RUNS_LIMIT = 16
"""The most runs of a node. A node has one or two, and at most 16 GPUs."""
CLOCK_RESOLUTION = 1e-6
"""Seconds: no offset between two nodes is exact."""


class ClockOffset:
    """The seconds by which this process' clock is ahead of a node's."""

    def __init__(self) -> None:
        self._low, self._high = float("-inf"), float("inf")

    def add(self, theirs: float, sent: float, received: float) -> None:
        """Add an answer that was written at the time `theirs`, after `sent` and before `received`."""
        low, high = max(self._low, sent - theirs), min(self._high, received - theirs)
        # The clocks have drifted apart, or one was stopped.
        self._low, self._high = (low, high) if low <= high else (sent - theirs, received - theirs)

    @property
    def seconds(self) -> float:
        """The offset."""
        return (self._low + self._high) / 2

    @property
    def error(self) -> float:
        """The most by which the offset may be wrong."""
        return (self._high - self._low) / 2


class Identity(NamedTuple):
    """Facts that the processes of a job have in common. A text is empty if it is unknown."""

    slurm_job: str
    namespace: str
    rendezvous: str
    boot: str
    """The node's boot if the rendezvous is an address of the node itself, such as `localhost`."""
    training: str
    """The number of the job among those of the node that have the run's name, if only that distinguishes them."""

    @classmethod
    def of(cls, sent: SentRank, boot: str) -> Identity:
        """Return the identity of a rank's process on a node."""
        training = "" if sent.rendezvous else str(sent.training)
        return cls(sent.job, sent.namespace, sent.rendezvous, boot if is_local(sent.rendezvous) else "", training)

    @property
    def port(self) -> str:
        """Return the rendezvous' port, which all nodes of a job have."""
        return self.rendezvous.rpartition(":")[2]

    @property
    def address(self) -> str:
        """Return the rendezvous, unless it is an address of the node itself."""
        return "" if self.boot else self.rendezvous

    def completed(self, other: Identity) -> Identity:
        """Return this identity with the values of another one for those that are unknown."""
        return Identity(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


def is_local(rendezvous: str) -> bool:
    """Return whether the rendezvous is an address by which each node names itself."""
    return LOCAL.match(rendezvous) is not None


class Found(NamedTuple):
    """A rank as its node has read it, with times by this process' clock."""

    run: Run
    process: Process
    reading: RankReading
    identity: Identity


@dataclass
class Node:
    """One node, as its exporter describes it."""

    name: str
    boot: str
    offset: ClockOffset = field(default_factory=ClockOffset)
    current: Moment | None = None
    """The last moment that was judged."""
    _runs: dict[Run, None] = field(default_factory=dict)
    """The runs of the last moment, in the order in which they came."""
    _moments: deque[Moment] = field(default_factory=deque)
    _sizes: deque[float] = field(default_factory=deque)
    """The bytes of each of them."""

    def take(self, answer: Answer, sent: float, received: float, size: int = 0) -> None:
        """Add an answer of `size` bytes. Drop the oldest moments if there are too many."""
        self.offset.add(answer.now, sent, received)
        newest = self.cursor
        for moment in answer.moments:
            # A moment of the future would hide all later ones.
            if (newest is None or moment.at > newest) and moment.at <= answer.now:
                newest = moment.at
                self._moments.append(moment)
                self._sizes.append(size / len(answer.moments))
        while len(self._moments) > KEPT_MOMENTS or sum(self._sizes) > KEPT_BYTES:
            self._moments.popleft()
            self._sizes.popleft()

    @property
    def cursor(self) -> float | None:
        """The newest moment, by the node's clock."""
        newest = self._moments[-1] if self._moments else self.current
        return newest.at if newest else None

    @property
    def known_until(self) -> float:
        """The time of the newest moment."""
        return float("-inf") if self.cursor is None else self.cursor + self.offset.seconds

    @property
    def seen(self) -> float:
        """The time of the last moment that was judged."""
        return self.current.at + self.offset.seconds if self.current else float("-inf")

    @property
    def has_ranks(self) -> bool:
        """Return whether any moment that is not judged yet, or the last one, has ranks."""
        return any(moment.ranks for moment in (self.current, *self._moments) if moment)

    def advance(self, until: float) -> Iterator[tuple[Process, str | None, Sequence[AnyStep]]]:
        """Go on to the last moment at or before that time. Yield the steps of all moments up to it."""
        while self._moments and self._moments[0].at + self.offset.seconds <= until:
            self.current = self._within_limit(self._moments.popleft())
            self._sizes.popleft()
            for sent in self.current.ranks:
                yield self.process(sent), sent.clock, [step_of(row, sent.clock) for row in sent.steps if sent.clock]

    def _within_limit(self, moment: Moment) -> Moment:
        """Leave out runs beyond the limit: first those of owners with more runs, then the youngest. Return the moment.

        A node that invents runs must not take the place of those of other nodes.
        """
        present = dict.fromkeys(tuple(sent.run) for sent in moment.ranks)
        self._runs = {run: None for run in (*self._runs, *present) if run in present}
        if len(self._runs) > RUNS_LIMIT:
            of_owner: dict[str, list[Run]] = defaultdict(list)
            for run in self._runs:
                of_owner[run[1]].append(run)
            turns = (run for turn in zip_longest(*of_owner.values()) for run in turn if run)
            kept = {*islice(turns, RUNS_LIMIT)}
            moment.ranks = [sent for sent in moment.ranks if tuple(sent.run) in kept]
        return moment

    def process(self, sent: SentRank) -> Process:
        """Return the process of a rank."""
        return Process(self.boot, sent.reading.began, tuple(sent.run), sent.reading.rank)

    def ranks(self, anchor: float) -> Iterator[Found]:
        """Yield the ranks of the last moment. `anchor` is the offset for the starts of processes."""
        ahead = self.offset.seconds
        for sent in self.current.ranks if self.current else ():
            one = sent.reading
            ended = replace(one.ended, at=one.ended.at + ahead) if one.ended else None
            saved = None if one.last_checkpoint is None else one.last_checkpoint + ahead
            killed = None if one.oom_killed_at is None else one.oom_killed_at + ahead
            reading = replace(
                one,
                node=self.name,
                at=one.at + ahead,
                began=one.began + anchor,
                ended=ended,
                last_progress=one.last_progress + ahead,
                phase_since=one.phase_since + ahead,
                last_checkpoint=saved,
                oom_killed_at=killed,
                clock_error=max(self.offset.error, CLOCK_RESOLUTION),
                is_missing=False,
            )
            yield Found(tuple(sent.run), self.process(sent), reading, Identity.of(sent, self.boot))

    @property
    def gpus(self) -> Gpus:
        """The GPUs that no rank on the node uses, by UUID."""
        return self.current.gpus if self.current else {}
