"""The history of each GPU, network port and node over all runs, for weeks, in one file of the state directory.

It has the findings that name a part, and by day what the driver and the kernel report. It is the node's and no user's,
so there is one file for all owners. If the clock is set, times of this process are moved with it, and nothing is
forgotten in the hour after: a node may boot with a wrong clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from rankscope_exporter.diagnosis.counters import increase
from rankscope_exporter.diagnosis.detectors import late
from rankscope_exporter.diagnosis.ports import PortFault
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.gpu.nvml.events import HARDWARE_XIDS
from rankscope_exporter.gpu.rank_gpus import GpuFaults
from rankscope_exporter.ledger.account import Account
from rankscope_exporter.ledger.blame import LINK, Reasons, evidence, named_gpus, named_node, throttled_seconds
from rankscope_exporter.ledger.owner_files import HISTORY_LIMIT, PARTS_LIMIT, OwnerFiles, replace_file
from rankscope_exporter.ledger.parts import FILE, WEEK, Day, Incident, Part, culprit_runs, read, text_of
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.recent import Recent

TEXT_LIMIT = 100
"""Characters of a name, which users choose."""
SHORT = 10.0
"""Seconds over which throttling is measured, and up to twice as many."""
FAULT_LASTS = 300.0
"""Seconds for which a hardware fault explains what happens to a run."""
LOST_AFTER = 60.0
"""Seconds without an answer after which a GPU is lost, as in the alert."""
STEADY = 3600.0
"""Seconds without a change of the clock after which old entries are forgotten."""
CLOCK_STEP = 30.0
LONGEST_POLL = 60.0
"""The longest time between two polls that is counted: in a longer one this process was stopped."""
COUNT_INTERVAL = 5.0
"""Seconds between two counts of the culprits."""
SAVE_INTERVAL, URGENT_INTERVAL, BYTES_PER_SECOND = 60.0, 10.0, 16_384
"""Seconds between two saved files, the same after a new entry, and what is written on average at the most."""
HARDWARE_EVENTS = frozenset({"ecc", "lost", *(f"xid {code}" for code in HARDWARE_XIDS)})

logger = logging.getLogger(__name__)
Culprits = Mapping[tuple[str, str, str], float]
"""Numbers of runs by a GPU's index, UUID and node."""


class Poll(NamedTuple):
    """The readings and findings of one moment."""

    look: Look
    findings: Iterable[tuple[Account, Mapping[str, Any]]]
    """The open findings, each with its run's account."""
    gpus: Collection[str]
    """The UUIDs of the GPUs that are there."""
    faults: Mapping[str, GpuFaults] = {}
    """What the driver reports of this node's GPUs, by UUID."""
    port_fault: PortFault | None = None


class NodeHistory:
    """The history of the parts of a node, or of all nodes whose runs an analyzer judges. Used by one thread."""

    def __init__(self, files: OwnerFiles | None, node: str = "") -> None:
        """Set the files of the state directory (None: nothing is kept), and the name of this node."""
        self._files, self._node = files, node
        self.culprits: Culprits = {}
        """The runs of the last week in which a GPU was the culprit, of the GPUs that are there."""
        self._parts: dict[tuple[str, str], Part] | None = None
        """The parts by key; None before the first update."""
        self._stamped: WeakSet[Incident | Day] = WeakSet()
        """The entries with times of this process."""
        self._at = self._unix = self._steady_since = self._counted_at = self._saved_at = -math.inf
        self._throttling = Recent[Mapping[str, Reasons]](SHORT)
        self._counters: dict[tuple[str, str], float] = {}
        """The driver's counters in the last poll, by UUID and event."""
        self._reasons: Mapping[str, Reasons] = {}
        """The throttled seconds of this node's GPUs in the last poll."""
        self._faults: dict[str, tuple[float, str]] = {}
        """The last hardware fault of each GPU, and its time by the polls' clock."""
        self._lost_since: dict[str, float] = {}
        self._is_changed = self._is_urgent = self._has_failed = False

    def update(self, poll: Poll) -> None:
        """Add one poll."""
        if self._files is None:
            return
        look = poll.look
        elapsed = look.at - self._at if 0.0 <= look.at - self._at <= LONGEST_POLL else 0.0
        if self._parts is None:
            self._parts = self._load(self._files)
        self._follow_clock(look.at, look.unix)
        self._at, self._unix = look.at, look.unix
        self._count_events(poll, elapsed)
        findings = [*poll.findings]
        throttled = self._throttled_ratios(look, is_needed=bool(findings))
        faults = {uuid: what for uuid, (at, what) in self._faults.items() if look.at - at < FAULT_LASTS}
        for account, found in findings:
            ranks = look.readings[account.key]
            named = [*self._named(found, ranks, poll)]
            for part, uuids in named:
                proof = LINK if part.port else evidence(uuids, found, ranks, throttled, faults)
                incident = self._incident(part, account, found, proof)
                self._add(part, incident, _waste(found, ranks) / len(named), elapsed)
        if not 0.0 <= look.at - self._counted_at < COUNT_INTERVAL:
            self._counted_at = look.at
            self._count_culprits(poll)
        if self._is_changed and look.at - self._saved_at >= (URGENT_INTERVAL if self._is_urgent else SAVE_INTERVAL):
            self.save()

    def save(self) -> None:
        """Replace the file if something has changed. A write error is logged once."""
        if self._files is None or not self._is_changed or self._parts is None:
            return
        text = text_of(self._parts.values(), self._unix, self._files.scale * HISTORY_LIMIT)
        try:
            replace_file(self._files.directory / FILE, text)
            self._has_failed = self._is_changed = self._is_urgent = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot save the history of the GPUs error=%s", error)
            self._has_failed = True
        self._saved_at = self._at + len(text) / BYTES_PER_SECOND

    def _load(self, files: OwnerFiles) -> dict[tuple[str, str], Part]:
        try:
            return {part.key: part for part in read(files.directory)}
        except FileNotFoundError:
            return {}
        except OSError as error:
            logger.warning("ignoring the saved history of the GPUs error=%s", error.strerror)
            return {}

    def _follow_clock(self, at: float, unix: float) -> None:
        """Move the times of this process if the clock was set. Forget what is old if it was not for an hour."""
        parts = self._parts or {}
        step = (unix - self._unix) - (at - self._at) if math.isfinite(self._at) else math.inf
        if abs(step) > CLOCK_STEP:
            self._steady_since = at
            for entry in self._stamped if math.isfinite(step) else ():
                if isinstance(entry, Day):
                    entry.at += step
                else:
                    entry.began, entry.ended = entry.began + step, entry.ended + step
        elif at - self._steady_since >= STEADY:
            self._steady_since = at
            self._is_changed = self._is_changed or bool(parts)
            for key, part in [*parts.items()]:
                part.forget(unix)
                if not (part.incidents or part.days):
                    del parts[key]

    def _part(self, part: Part) -> Part:
        """Return the part with this key. A new one replaces that to which nothing has happened for the longest time."""
        parts = self._parts if self._parts is not None else {}
        if known := parts.get(part.key):
            known.node, known.gpu = part.node, part.gpu
            return known
        if self._files and len(parts) >= self._files.scale * PARTS_LIMIT:
            del parts[
                min(parts, key=lambda key: (any(one.is_blamed for one in parts[key].incidents), parts[key].newest))
            ]
        return parts.setdefault(part.key, part)

    def _named(
        self, found: Mapping[str, Any], ranks: Sequence[RankReading], poll: Poll
    ) -> Iterator[tuple[Part, Collection[str]]]:
        """Yield the parts that a finding is about, each with its GPUs, without GPUs that are not there."""
        nodes = {one.uuid: one.node for one in ranks}
        indices = {one.uuid: one.gpu.index for one in ranks if one.gpu}
        for uuid in named_gpus(found, ranks):
            if uuid in poll.gpus:
                gpu = poll.faults[uuid].gpu if uuid in poll.faults else indices.get(uuid, found["gpu"])
                yield self._part(Part(self._node or nodes.get(uuid, found["node"])[:TEXT_LIMIT], gpu, uuid)), (uuid,)
        if found["port"]:
            yield self._part(Part(self._node or found["node"][:TEXT_LIMIT], port=found["port"][:TEXT_LIMIT])), ()
        elif node := named_node(found, ranks):
            uuids = {uuid for uuid, on in nodes.items() if on == node}
            yield self._part(Part(self._node or node[:TEXT_LIMIT])), uuids

    def _incident(self, part: Part, account: Account, found: Mapping[str, Any], proof: str) -> Incident:
        return Incident(
            run=account.run[:TEXT_LIMIT],
            owner=account.owner[:TEXT_LIMIT],
            training=account.training[:TEXT_LIMIT],
            start=int(account.launched),
            kind=found["kind"],
            cause=found["cause"][:TEXT_LIMIT],
            rank=found["rank"],
            node=part.node,
            gpu=part.gpu,
            began=min(max(found["begin"], account.launched), self._unix),
            ended=self._unix,
            evidence=proof,
        )

    def _add(self, part: Part, now: Incident, waste: float, elapsed: float) -> None:
        """Add an open finding, which wastes so many GPUs, or what has changed of it."""
        incident = next((one for one in part.incidents if one.key == now.key), None)
        is_new = incident is None
        if incident is None:
            incident, elapsed = now, now.ended - now.began
            part.add(incident)
        self._stamped.add(incident)
        incident.ended = now.ended
        incident.gpu_seconds += waste * elapsed
        is_proven = now.evidence not in ("", incident.evidence) and not incident.is_blamed
        if is_proven:
            incident.evidence = now.evidence
        self._is_urgent = self._is_urgent or is_new or is_proven
        self._is_changed = True

    def _count_events(self, poll: Poll, elapsed: float) -> None:
        """Count what the driver and the kernel have reported of this node's parts since the last poll."""
        gpus = poll.look.gpus
        for uuid, fault in poll.faults.items():
            if part := (self._parts or {}).get(("", uuid)):
                part.gpu, part.node = fault.gpu, self._node  # it may have been moved
            counted = {f"xid {code}": self._increase(uuid, f"xid {code}", n, 0.0) for code, n in fault.xids.items()}
            counted["ecc"] = self._increase(uuid, "ecc", fault.uncorrected_errors)
            counted["lost"] = elapsed if self._is_lost(uuid, fault) else 0.0
            for event in filter(counted.get, counted):
                if event in HARDWARE_EVENTS:
                    self._faults[uuid] = self._at, event
                    self._is_urgent = True
            self._count(Part(self._node, fault.gpu, uuid), counted)
        reduced = {uuid for uuid, gpu in gpus.items() if gpu.reading.is_link_reduced}
        for uuid, gpu in gpus.items():
            counted = {"throttled": throttled_seconds(gpu.counters.throttled, self._reasons.get(uuid), gpu.reading)}
            counted["link"] = elapsed if uuid in reduced and len(reduced) < len(gpus) else 0.0
            self._count(Part(self._node, gpu.reading.index, uuid), counted)
        self._reasons = {uuid: gpu.counters.throttled for uuid, gpu in gpus.items()}
        if port := poll.port_fault:
            self._count(Part(self._node, port=port.port[:TEXT_LIMIT]), {f"port {port.reason}": elapsed})

    def _increase(self, uuid: str, event: str, now: float | None, first: float | None = None) -> float:
        """Return the increase of a counter; 0 if it is unknown. `first` is what it was before the first poll."""
        before = self._counters.get((uuid, event), first)
        if now is not None:
            self._counters[uuid, event] = now
        return 0.0 if now is None or before is None else increase(now, before) or 0.0

    def _is_lost(self, uuid: str, fault: GpuFaults) -> bool:
        if not fault.is_lost:
            self._lost_since.pop(uuid, None)
            return False
        return self._at - self._lost_since.setdefault(uuid, self._at) >= LOST_AFTER

    def _count(self, part: Part, counted: Mapping[str, float]) -> None:
        for event, number in counted.items():
            if number > 0.0:
                self._stamped.add(self._part(part).count(event, number, self._unix))
                self._is_changed = True

    def _throttled_ratios(self, look: Look, *, is_needed: bool) -> Mapping[str, float]:
        """Return the ratio of the last seconds in which each GPU was throttled for a reason of the hardware."""
        ranks = (one for readings in look.readings.values() for one in readings)
        gpus = {one.uuid: (one.counters.gpu.throttled, one.gpu) for one in ranks if one.gpu}
        gpus |= {uuid: (gpu.counters.throttled, gpu.reading) for uuid, gpu in look.gpus.items()}
        self._throttling.add(look.at, {uuid: reasons for uuid, (reasons, _) in gpus.items()})
        at, then = self._throttling.oldest
        if look.at <= at or not is_needed:
            return {}
        spent = {uuid: throttled_seconds(now, then.get(uuid), reading) for uuid, (now, reading) in gpus.items()}
        return {uuid: seconds / (look.at - at) for uuid, seconds in spent.items()}

    def _count_culprits(self, poll: Poll) -> None:
        parts = [*(self._parts or {}).values()]
        counted = {part.uuid: (part, culprit_runs(part, parts, self._unix - WEEK)) for part in parts if part.uuid}
        found: dict[tuple[str, str, str], float] = {
            (part.gpu, uuid, part.node): float(runs) for uuid, (part, runs) in counted.items() if uuid in poll.gpus
        }
        others = {uuid: fault for uuid, fault in poll.faults.items() if uuid not in counted}
        self.culprits = found | {(fault.gpu, uuid, self._node): 0.0 for uuid, fault in others.items()}


def _waste(found: Mapping[str, Any], ranks: Sequence[RankReading]) -> float:
    """Return how many GPUs a finding wastes: those of the living ranks; for late ranks, those of the others."""
    living = sum(one.ended is None for one in ranks)
    late_ranks = len(found["ranks"] or (0,)) if found["kind"] == late.KIND else 0
    return float(found["ratio"]) * max(living - late_ranks, 0)
