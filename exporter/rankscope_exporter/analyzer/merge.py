"""The nodes joined at one time: each rank once, with a GPU that another exporter reads, and those that are missing."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from rankscope_exporter.analyzer.alignment import NodesAlignment, Present, Process
from rankscope_exporter.analyzer.jobs import Jobs, Record
from rankscope_exporter.analyzer.nodes import Node
from rankscope_exporter.diagnosis.judged import of_newest_start
from rankscope_exporter.diagnosis.readings import UNKNOWN_NODE, AlignedCounters, RankReading, Run
from rankscope_exporter.node_facts.wire import Answer, SentGpu

SILENT_AFTER = 10.0
"""Seconds without a moment after which a node's ranks are missing: five pulls."""
WAIT = 6.0
"""The longest time for which the others wait for a node's moments."""
LOG_INTERVAL = 60.0
"""Seconds between two lines about ranks that live twice, whatever runs a node invents."""
FORGET_AFTER, FORGET_RUN_AFTER = 86_400.0, 900.0
"""Seconds after which a node that does not answer is forgotten, and a run of which no node answers."""
NAME_LIMIT = 120
"""The most characters of a node's name before the address of its target."""
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
        """The offset for the starts of processes, by boot. It does not change while the node is known."""
        self.restored_anchors: dict[str, float] = {}
        self._named: dict[str, str] = {}
        """The target that has a node's name. One on another node cannot take it."""
        self._alignment = NodesAlignment()
        self._sources: dict[Process, str] = {}
        """The target whose steps of a process count."""
        self._shown: dict[tuple[Run, int], Process] = {}
        self._first_seen: dict[Run, float] = {}
        self._logged: set[Run] = set()
        self._log_after = -inf
        self.jobs = Jobs()

    def take(self, target: str, answer: Answer, sent: float, received: float, size: int = 0) -> None:
        """Add the answer of a target, of `size` bytes.

        The times are those of the request and the answer by this process' clock.
        """
        node = self.nodes.get(target)
        if node is None or node.boot != answer.boot:
            node = self.nodes[target] = Node(answer.node, answer.boot)
        node.name = self._name(target, answer, received)
        node.take(answer, sent, received, size)
        self.anchors.setdefault(node.boot, self.restored_anchors.get(node.boot, node.offset.seconds))

    def _name(self, target: str, answer: Answer, now: float) -> str:
        """Return the node's name, with the target if one on another node has that name and is not long silent."""
        name = answer.node
        owner = self._named.get(name, target)
        known = self.nodes.get(owner) if owner != target else None
        if known and now - known.known_until <= FORGET_RUN_AFTER:
            is_same_node = known.boot == answer.boot != ""
            return name if is_same_node else f"{name[:NAME_LIMIT]} ({target.partition('//')[2]})"
        self._named = {named: one for named, one in self._named.items() if one != target} | {name: target}
        return name

    def known_until(self, now: float, judged_until: float, *, is_resumed: bool) -> float:
        """Return the time until which all nodes with ranks are known.

        A node that is late is not waited for, unless this process was stopped and has just resumed. A node that was
        silent at the last time that was judged never is.
        """
        known = [node.known_until for node in self.nodes.values() if node.has_ranks]
        until = min((one for one in known if judged_until - one <= SILENT_AFTER), default=now)
        return until if is_resumed else max(until, now - WAIT)

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
        boots = {node.boot for node in self.nodes.values()}
        self.anchors = {boot: offset for boot, offset in self.anchors.items() if boot in boots}
        self._named = {name: target for name, target in self._named.items() if target in self.nodes}
        gpus = {(node.boot, uuid): gpu for node in self.nodes.values() for uuid, gpu in node.gpus.items()}
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
        known = {one.uuid for ranks in readings.values() for one in ranks if one.gpu}
        lost = {run for run, ranks in readings.items() if all(one.is_missing for one in ranks)}
        return Joined(readings, frozenset(known), missing, frozenset(lost))

    def _ranks(self, at: float) -> tuple[dict[Run, list[Present]], Mapping[Run, set[str]]]:
        """Return each rank once, and the names of the silent nodes of each run."""
        records: list[Record] = []
        for target, node in self.nodes.items():
            is_silent = at - node.seen > SILENT_AFTER
            records += [Record(one, target, node.name, is_silent) for one in node.ranks(self.anchors[node.boot])]
        found: dict[tuple[Run, int], list[Record]] = defaultdict(list)
        for run, record in self.jobs.name(at, records):
            found[run, record.rank].append(record)
        runs: dict[Run, list[Present]] = defaultdict(list)
        silent: dict[Run, set[str]] = defaultdict(set)
        shown, self._shown = self._shown, {}
        for (run, rank), rivals in found.items():
            record = max(rivals, key=lambda one: self._precedence(one, shown.get((run, rank))))
            self._log_rivals(at, run, record, rivals)
            if record.is_missing:
                silent[run].add(record.node)
            reading = replace(record.found.reading, is_missing=record.is_missing)
            self._shown[run, rank] = record.found.process
            runs[run].append(Present(record.found.process, reading))
        self._logged &= runs.keys()
        kept = {run: _of_newest_start(ranks) for run, ranks in runs.items() if not _is_forgotten(at, ranks)}
        return kept, silent

    def _precedence(self, one: Record, shown: Process | None) -> tuple[bool, bool, float, bool]:
        """Return the precedence among several records of a rank: living ones, the one shown before, then the oldest.

        Of others, the youngest. Of several of one process, the one of the target whose steps count.
        """
        process, began = one.found.process, one.found.reading.began
        is_source = self._sources.get(process) == one.target
        return one.is_living, one.is_living and process == shown, -began if one.is_living else began, is_source

    def boots(self) -> Mapping[Run, Mapping[str, float]]:
        """Return the anchors of the nodes of each run."""
        found: dict[Run, dict[str, float]] = defaultdict(dict)
        for (run, _), process in self._shown.items():
            found[run][process.boot] = self.anchors[process.boot]
        return found

    def names_by_boot(self, runs: Collection[Run]) -> Mapping[str, Collection[Run]]:
        """Return by the boot of each node with ranks of these runs how it names them."""
        found: dict[str, set[Run]] = defaultdict(set)
        for (run, _), process in self._shown.items() if runs else ():
            if run in runs:
                found[process.boot].add(process.run)
        return found

    def _log_rivals(self, at: float, run: Run, shown: Record, rivals: Iterable[Record]) -> None:
        living = {one.found.process for one in rivals if one.is_living}
        is_due = run not in self._logged and at >= self._log_after
        if is_due and len(living - {shown.found.process}):
            self._logged.add(run)
            self._log_after = at + LOG_INTERVAL
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


def _complete(one: Present, aligned: AlignedCounters | None, gpus: Mapping[tuple[str, str], SentGpu]) -> RankReading:
    """Return the reading with the steps that were compared, and its GPU if another exporter of its node reads it."""
    reading = one.reading
    counters = replace(reading.counters, aligned=aligned or AlignedCounters())
    if reading.gpu is None and (gpu := gpus.get((one.process.boot, reading.uuid))):
        return replace(reading, gpu=gpu.reading, counters=replace(counters, gpu=gpu.counters))
    return replace(reading, counters=counters)
