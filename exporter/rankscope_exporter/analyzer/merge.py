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
from rankscope_exporter.diagnosis.readings import UNKNOWN_NODE, AlignedCounters, RankReading, Run
from rankscope_exporter.node_facts.wire import Answer, SentGpu

SILENT_AFTER = 10.0
"""Seconds without a moment after which a node's ranks are missing: five pulls."""
WAIT = 6.0
"""The longest time for which the others wait for a node's moments."""
FORGET_AFTER, FORGET_RUN_AFTER = 86_400.0, 900.0
"""Seconds after which a node that does not answer is forgotten, and a run of which no node answers."""
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


class _Record(NamedTuple):
    """A rank as one target has sent it."""

    found: Found
    node: str
    is_silent: bool

    @property
    def rank(self) -> int:
        return self.found.reading.rank

    @property
    def is_living(self) -> bool:
        return self.found.reading.ended is None and not self.is_silent

    @property
    def is_missing(self) -> bool:
        return self.found.reading.ended is None and self.is_silent

    def precedence(self, shown: Process | None) -> tuple[bool, bool, float]:
        """Return the precedence among several records of a rank: living ones, the one shown before, then the oldest.

        Of others, the youngest.
        """
        began = self.found.reading.began
        return self.is_living, self.is_living and self.found.process == shown, -began if self.is_living else began


class _Jobs:
    """Names for runs of one name that are several Slurm jobs: the first one keeps the name."""

    def __init__(self) -> None:
        self._first: dict[Run, str] = {}

    def name(self, records: Sequence[_Record]) -> Iterator[tuple[Run, _Record]]:
        """Yield each record with the name of its run."""
        jobs: dict[Run, dict[str, None]] = defaultdict(dict)
        for one in sorted(records, key=lambda one: one.found.reading.began):
            if one.is_living and one.found.job:
                jobs[one.found.run][one.found.job] = None
        self._first = {
            run: first if (first := self._first.get(run, "")) in found else next(iter(found))
            for run, found in jobs.items()
        }
        for one in records:
            run, job = one.found.run, one.found.job
            is_other = len(jobs[run]) > 1 and job not in ("", self._first[run])
            yield ((f"{run[0]} (job {job})", *run[1:]) if is_other else run), one


class Merge:
    """The state of all nodes. Not thread-safe."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        """By target."""
        self.anchors: dict[str, float] = {}
        """The offset for the starts of processes, by boot. It never changes."""
        self._alignment = NodesAlignment()
        self._sources: dict[Process, str] = {}
        """The target whose steps of a process count."""
        self._shown: dict[tuple[Run, int], Process] = {}
        self._first_seen: dict[Run, float] = {}
        self._logged: set[Run] = set()
        self._jobs = _Jobs()

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
        for target, node in self.nodes.items():
            for process, clock, steps in node.advance(at):
                # A target that shows a process of another one adds no steps to it.
                source = self._sources.setdefault(process, target)
                if source not in self.nodes or at - self.nodes[source].seen > SILENT_AFTER:
                    self._sources[process] = source = target
                if source == target:
                    self._alignment.add(process, clock, steps)
        self.nodes = {target: node for target, node in self.nodes.items() if at - node.known_until < FORGET_AFTER}
        gpus = {uuid: gpu for node in self.nodes.values() for uuid, gpu in node.gpus.items()}
        runs, silent = self._ranks(at)
        self._first_seen = {run: self._first_seen.get(run, at) for run in runs}
        missing = {run: names for run in runs if (names := self._missing(at, run, runs[run], silent[run]))}
        aligned = self._alignment.align({run: ranks for run, ranks in runs.items() if run not in missing})
        processes = {one.process for ranks in runs.values() for one in ranks}
        self._alignment.keep(processes)
        self._sources = {one: target for one, target in self._sources.items() if one in processes}
        readings: dict[Run, Sequence[RankReading]] = {}
        for run, ranks in runs.items():
            found = [_complete(one, aligned.get(one.process), gpus) for one in ranks]
            readings[run] = [*found, *(_absent(found) if UNKNOWN_NODE in missing.get(run, ()) else ())]
        known = {one.uuid for ranks in readings.values() for one in ranks if one.gpu} | gpus.keys()
        lost = {run for run, ranks in readings.items() if all(one.is_missing for one in ranks)}
        return Joined(readings, frozenset(known), missing, frozenset(lost))

    def _ranks(self, at: float) -> tuple[dict[Run, list[Present]], Mapping[Run, set[str]]]:
        """Return each rank once, and the names of the silent nodes of each run."""
        records: list[_Record] = []
        for node in self.nodes.values():
            is_silent = at - node.seen > SILENT_AFTER
            records += [_Record(one, node.name, is_silent) for one in node.ranks(self.anchors[node.boot])]
        found: dict[tuple[Run, int], list[_Record]] = defaultdict(list)
        for run, record in self._jobs.name(records):
            found[run, record.rank].append(record)
        runs: dict[Run, list[Present]] = defaultdict(list)
        silent: dict[Run, set[str]] = defaultdict(set)
        shown, self._shown = self._shown, {}
        for (run, rank), rivals in found.items():
            record = max(rivals, key=lambda one: one.precedence(shown.get((run, rank))))
            self._log_rivals(run, record, rivals)
            if record.is_missing:
                silent[run].add(record.node)
            reading = replace(record.found.reading, is_missing=record.is_missing)
            self._shown[run, rank] = record.found.process
            runs[run].append(Present(record.found.process, reading))
        self._logged &= runs.keys()
        kept = {run: _of_newest_start(ranks) for run, ranks in runs.items() if not _is_forgotten(at, ranks)}
        return kept, silent

    def _log_rivals(self, run: Run, shown: _Record, rivals: Iterable[_Record]) -> None:
        living = {one.found.process for one in rivals if one.is_living}
        if run not in self._logged and len(living - {shown.found.process}):
            self._logged.add(run)
            logger.warning(
                "several processes are the same rank; the first one counts run=%s rank=%d node=%s",
                run[0], shown.rank, shown.node,
            )  # fmt: skip

    def _missing(self, at: float, run: Run, ranks: Sequence[Present], silent: Collection[str]) -> Sequence[str]:
        """Return the names of the silent nodes of a run; `unknown` if only ranks are missing that were never shown.

        Until the first step, the others may not have begun.
        """
        is_begun = at - self._first_seen[run] > SILENT_AFTER and any(one.reading.counters.steps for one in ranks)
        if is_begun and [*_absent([one.reading for one in ranks])]:
            return sorted({*silent, UNKNOWN_NODE})
        return sorted(silent)


def _is_forgotten(at: float, ranks: Sequence[Present]) -> bool:
    """Return whether no node shows the run any longer, for longer than an exporter shows an ended one."""
    return all(one.reading.is_missing and at - one.reading.at > FORGET_RUN_AFTER for one in ranks)


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
