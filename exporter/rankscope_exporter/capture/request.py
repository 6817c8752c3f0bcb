"""A request for a capture: the exporter's view of the run, as JSON for the process that captures.

That process reads the ranks' records itself. What a record says never chooses the process that is read: the kernel does
(`rankscope.cli.lock_holder`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.detectors import crash, hang
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.readings import Run, run_title
from rankscope_exporter.ranks.look import Look

RANKS_LIMIT = 256
"""As in the exporter."""


@dataclass(frozen=True)
class WantedRank:
    """A rank of the run on this node."""

    rank: int
    record: str
    """The path of its record."""
    place: str
    """Where it is: `Rank 2 (node-a, GPU 2)`."""
    gpu: str = ""
    pid: int = 0
    """Its process by the kernel, when the exporter read it."""


@dataclass(frozen=True)
class Found:
    """The diagnosis of the standstill, or of the crash."""

    kind: str
    cause: str
    rank: int | None
    """The rank that it names."""
    sentence: str
    short: str
    """The same without the run: `Rank 2 (node-a, GPU 2) is stuck in data_wait`."""
    seconds: float
    """Seconds without progress, or since the crash."""
    evidence: str
    advice: str
    is_alert: bool
    """False for a hang that has not lasted long enough to be a finding."""


@dataclass(frozen=True)
class Request:
    """A run to capture, with what the exporter knows of it."""

    run: str
    """Its name in the records."""
    owner: int
    label: str
    """Its name in the metrics."""
    title: str
    reason: str
    node: str
    ranks: Sequence[WantedRank]
    found: Found | None = None
    at: float = 0.0
    """When the exporter read the ranks, in seconds of CLOCK_MONOTONIC."""
    others: Sequence[str] = ()
    """The sentences of the run's other findings, or why it is not diagnosed here."""
    gpus: str = ""
    """The state of the node's GPUs, which only the exporter reads."""
    no_gpus: str = "no exporter took part"
    """The reason without it."""
    dumps: Sequence[Mapping[str, Any]] = ()
    """The places of torch's dumps by an earlier capture: what has ended no longer shows them."""

    def until(self, now: float) -> Request:
        """Return the request with the seconds of what was found until now."""
        if self.found is None or not self.at:
            return self
        return replace(self, found=replace(self.found, seconds=self.found.seconds + max(now - self.at, 0.0)))

    def as_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))


def parse(text: str) -> Request:
    """Return the request. Raise ValueError, KeyError or TypeError."""
    values = json.loads(text)
    values["ranks"] = [WantedRank(**one) for one in values["ranks"]]
    values["found"] = Found(**values["found"]) if values["found"] else None
    return Request(**values)


def request_of(look: Look, run: Run, reason: str, node: str) -> Request | None:
    """Return the request for a run of a poll; None if no record of it is here, or it has several owners' records."""
    here = [rank for rank in look.scan.ranks if rank.run == run]
    owners = {rank.owner for rank in here}
    if len(owners) != 1:
        return None
    gpus = {uuid: gpu.reading.index for uuid, gpu in look.gpus.items()}
    wanted = [wanted_rank(rank.snapshot, int(rank.key[1]), gpus.get(rank.uuid, "")) for rank in here[:RANKS_LIMIT]]
    verdict = next((one for one in look.judged.verdicts if one.run == run), None)
    others = [words.sentence(run, one.candidate) for one in verdict.findings] if verdict else []
    return Request(
        run=str(here[0].snapshot.info["run"]),
        owner=owners.pop(),
        label=run[0],
        title=run_title(run),
        reason=reason,
        node=node,
        ranks=sorted(wanted, key=lambda one: one.rank),
        found=_found(run, verdict) if verdict else None,
        at=look.at,
        others=others,
    )


def wanted_rank(snapshot: RankSnapshot, number: int, gpu: str = "") -> WantedRank:
    """Return a rank of a request."""
    place = Place(number, node=str(snapshot.info["node"]), gpu=gpu)
    where = words.where(Candidate("", 0.0, place=place))
    return WantedRank(number, str(snapshot.path), where, gpu, snapshot.lock_pid)


def _found(run: Run, verdict: Verdict) -> Found | None:
    """Return the crash, or else the hang, also if it is not a finding yet."""
    kinds = (crash.KIND, hang.KIND)
    findings = [(one.candidate, True) for one in verdict.findings]
    pending = [(one.candidate, False) for one in verdict.pending]
    found = [one for one in (*findings, *pending) if one[0].kind in kinds]
    if not found:
        return None
    candidate, is_alert = min(found, key=lambda one: kinds.index(one[0].kind))
    return Found(
        kind=candidate.kind,
        cause=candidate.cause,
        rank=candidate.place.rank,
        sentence=words.sentence(run, candidate),
        short=words.short_sentence(candidate),
        seconds=candidate.evidence.get("stalled", candidate.lasted or 0.0),
        evidence=words.evidence(candidate),
        advice=words.advice(candidate),
        is_alert=is_alert,
    )
