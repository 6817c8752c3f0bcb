"""The nodes joined at one time: each rank once, with a GPU that another exporter reads, and those that are missing."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rankscope_exporter.analyzer.alignment import NodesAlignment, Present, Process
from rankscope_exporter.analyzer.nodes import Found, Node
from rankscope_exporter.diagnosis.judged import of_newest_start
from rankscope_exporter.diagnosis.readings import AlignedCounters, RankReading, Run
from rankscope_exporter.node_facts.wire import Answer, SentGpu

SILENT_AFTER = 10.0
"""Seconds without a moment after which a node's ranks are missing: three pulls."""
WAIT = 6.0
"""The longest time for which the others wait for a node's moments."""
FORGET_AFTER = 86_400.0
UNKNOWN = "unknown"
"""The name of a node that has never had an exporter."""
WORLD_LIMIT = 4096
"""The largest world size of a run whose absent ranks are looked for."""

logger = logging.getLogger(__name__)


class Joined(NamedTuple):
    """All nodes at one time."""

    readings: Mapping[Run, Sequence[RankReading]]
    known_gpus: frozenset[str]
    missing: Mapping[Run, Sequence[str]]
    """The runs of which ranks are missing, with the names of the nodes that do not answer."""
    not_answering: frozenset[Run]
    """The runs of which all living ranks are missing."""


class Merge:
    """The state of all nodes. Not thread-safe."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        """By target."""
        self.anchors: dict[str, float] = {}
        """The offset for the starts of processes, by boot. It never changes."""
        self._alignment = NodesAlignment()
        self._shown: dict[tuple[Run, int], Process] = {}
        self._first_seen: dict[Run, float] = {}
        self._logged: set[tuple[Run, int]] = set()

    def take(self, target: str, answer: Answer, sent: float, received: float) -> None:
        """Add the answer of a target. The times are those of the request and the answer by this process' clock."""
        node = self.nodes.get(target)
        if node is None or node.boot != answer.boot:
            node = self.nodes[target] = Node(answer.node, answer.boot)
        node.name = answer.node
        node.take(answer, sent, received)
        self.anchors.setdefault(node.boot, node.offset.seconds)

    def known_until(self, now: float) -> float:
        """Return the time until which all nodes with ranks are known. A node that is late is not waited for."""
        known = [node.known_until for node in self.nodes.values() if node.has_ranks]
        return max(min(known, default=now), now - WAIT)

    def join(self, at: float) -> Joined:
        """Go on to that time, compare the steps, and return the readings of each run."""
        for node in self.nodes.values():
            for process, clock, steps in node.advance(at):
                self._alignment.add(process, clock, steps)
        self.nodes = {target: node for target, node in self.nodes.items() if at - node.known_until < FORGET_AFTER}
        gpus = {uuid: gpu for node in self.nodes.values() for uuid, gpu in node.gpus.items()}
        runs, silent = self._ranks(at)
        self._first_seen = {run: self._first_seen.get(run, at) for run in runs}
        missing = {run: names for run in runs if (names := self._missing(at, run, runs[run], silent[run]))}
        aligned = self._alignment.align({run: ranks for run, ranks in runs.items() if run not in missing})
        self._alignment.keep([one.process for ranks in runs.values() for one in ranks])
        readings: dict[Run, Sequence[RankReading]] = {}
        for run, ranks in runs.items():
            found = [_complete(one, aligned.get(one.process), gpus) for one in ranks]
            readings[run] = [*found, *(_absent(found) if UNKNOWN in missing.get(run, ()) else ())]
        known = {one.uuid for ranks in readings.values() for one in ranks if one.gpu} | gpus.keys()
        lost = {run for run, ranks in readings.items() if run in missing and all(_is_unknown(one) for one in ranks)}
        return Joined(readings, frozenset(known), missing, frozenset(lost))

    def _ranks(self, at: float) -> tuple[dict[Run, list[Present]], Mapping[Run, set[str]]]:
        """Return each rank once, and the names of the silent nodes of each run."""
        found: dict[tuple[Run, int], list[tuple[Found, bool]]] = defaultdict(list)
        names: dict[Process, str] = {}
        for node in self.nodes.values():
            is_silent = at - node.seen > SILENT_AFTER
            for one in node.ranks(self.anchors[node.boot]):
                found[one.run, one.reading.rank].append((one, is_silent))
                names[one.process] = node.name
        runs: dict[Run, list[Present]] = defaultdict(list)
        silent: dict[Run, set[str]] = defaultdict(set)
        shown, self._shown = self._shown, {}
        for (run, rank), ones in found.items():
            one, is_silent = max(ones, key=lambda pair: _precedence(pair[0], pair[1], shown.get((run, rank))))
            self._log_rivals(run, rank, one, ones)
            is_missing = is_silent and one.reading.ended is None
            if is_missing:
                silent[run].add(names[one.process])
            self._shown[run, rank] = one.process
            runs[run].append(Present(one.process, replace(one.reading, is_missing=is_missing)))
        return {run: _of_newest_start(ranks) for run, ranks in runs.items()}, silent

    def _log_rivals(self, run: Run, rank: int, shown: Found, ones: Iterable[tuple[Found, bool]]) -> None:
        living = {one.process for one, is_silent in ones if one.reading.ended is None and not is_silent}
        if len(living - {shown.process}) and (run, rank) not in self._logged:
            self._logged.add((run, rank))
            logger.warning(
                "several processes are the same rank; the first one counts run=%s rank=%d node=%s",
                run[0], rank, shown.reading.node,
            )  # fmt: skip

    def _missing(self, at: float, run: Run, ranks: Sequence[Present], silent: Collection[str]) -> Sequence[str]:
        """Return the names of the silent nodes of a run; `unknown` if only ranks are missing that were never shown.

        Until the first step, the others may not have begun.
        """
        is_begun = at - self._first_seen[run] > SILENT_AFTER and any(one.reading.counters.steps for one in ranks)
        if is_begun and [*_absent([one.reading for one in ranks])]:
            return sorted({*silent, UNKNOWN})
        return sorted(silent)


def _precedence(found: Found, is_silent: bool, shown: Process | None) -> tuple[bool, bool, bool, float]:
    """Return the precedence among several records of a rank: the living one, the one shown before, then the oldest.

    Ended ones: the youngest.
    """
    reading = found.reading
    is_alive = reading.ended is None
    return is_alive, is_alive and not is_silent, found.process == shown, -reading.began if is_alive else reading.began


def _is_unknown(one: RankReading) -> bool:
    return one.is_missing or one.ended is not None


def _of_newest_start(ranks: Sequence[Present]) -> list[Present]:
    kept = {id(one) for one in of_newest_start([one.reading for one in ranks])}
    return [one for one in ranks if id(one.reading) in kept]


def _absent(ranks: Sequence[RankReading]) -> Iterator[RankReading]:
    """Yield a reading for each rank of the run that no exporter shows."""
    living = [one for one in ranks if one.ended is None]
    sizes = {one.world_size for one in living}
    if len(sizes) != 1 or not 1 < (size := max(sizes)) <= WORLD_LIMIT:
        return
    at, began = max(one.at for one in living), min(one.began for one in living)
    present = {one.rank for one in ranks}
    for rank in range(size):
        if rank not in present:
            yield RankReading(rank, at, began, world_size=size, last_progress=began, is_missing=True)


def _complete(one: Present, aligned: AlignedCounters | None, gpus: Mapping[str, SentGpu]) -> RankReading:
    """Return the reading with the steps that were compared, and with its GPU if another exporter reads it."""
    reading = one.reading
    counters = replace(reading.counters, aligned=aligned or AlignedCounters())
    if reading.gpu is None and (gpu := gpus.get(reading.uuid)):
        return replace(reading, gpu=gpu.reading, counters=replace(counters, gpu=gpu.counters))
    return replace(reading, counters=counters)
