"""The account of one run's GPU time by cause since its ranks began, for the report at its end.

The causes sum to the time of the ranks, by the counters of their records, plus the time of GPUs whose rank has ended
while others are alive. The judge divides the time that it has seen by cause. All other time, such as the start-up
before the record appeared or a run with ranks on other nodes, is divided by the phases of the ranks' own clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.counters import increase
from rankscope_exporter.diagnosis.findings import Finding, Place
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.judged import of_newest_start
from rankscope_exporter.diagnosis.lost import by_cause
from rankscope_exporter.diagnosis.priority import STANDSTILLS
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Rank

GONE_LIMIT = 16
"""The most ranks of a run that are kept after their records are gone, since a run can keep using new rank numbers. A
forgotten rank that comes back is counted twice."""
NODES_LIMIT = 64
LIKE_BEFORE_SECONDS = 10.0
"""The longest time before a run's end that is divided like the time before it: a longer one was without progress."""
CAUSES_LIMIT = 64
"""The most causes of a run; all others are `other`, since a script can invent phases without limit."""


def add_seconds(seconds: dict[str, float], spent: Mapping[str, float]) -> None:
    """Add GPU seconds by cause, with at most CAUSES_LIMIT causes."""
    for cause, more in spent.items():
        counted = cause if cause in seconds or len(seconds) < CAUSES_LIMIT else "other"
        seconds[counted] = seconds.get(counted, 0.0) + more


@dataclass
class GpuUse:
    """The use of one GPU while ranks of the run were alive on it. None is unknown."""

    node: str
    index: str
    seconds: float = 0.0
    busy: float | None = None
    """Seconds in which a kernel ran."""
    joules: float | None = None
    memory: float | None = None
    """The peak of used memory, in bytes."""
    memory_total: float | None = None
    busy_counter: float | None = None
    joules_counter: float | None = None

    def update(self, seconds: float, gpu: RankGpu) -> None:
        """Add the GPU's current values, `seconds` after the last ones."""
        self.seconds += seconds
        self.busy = _add_increase(self.busy, self.busy_counter, gpu.counters.busy)
        self.joules = _add_increase(self.joules, self.joules_counter, gpu.joules)
        self.busy_counter, self.joules_counter = gpu.counters.busy, gpu.joules
        if gpu.memory:
            self.memory = max(gpu.memory.used, self.memory or 0.0)
            self.memory_total = float(gpu.memory.total)


@dataclass
class RankUse:
    """The use of one rank."""

    began: float
    """The start of its current process, by the monotonic clock."""
    divided: dict[str, float] = field(default_factory=dict)
    """Seconds of that process by phase that are already accounted for."""
    cpu: float = 0.0
    """CPU seconds of that process and its loader workers."""
    cpu_before: float = 0.0
    """CPU seconds of its earlier processes."""
    record: str = ""
    """The path of its record."""


@dataclass
class Account:
    """The account of one run. Times are unix seconds."""

    run: str
    owner: str
    training: str = ""
    """The number of its only rank if other trainings have the same name and owner; see Run."""
    user: str = ""
    slurm: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    world_size: int = 0
    began: float = 0.0
    """The start, which never changes: run, owner and start identify the account."""
    launched: float = 0.0
    """The same, but of its last launch: a run that has finished and starts again under its name is another one."""
    has_finished: bool = False
    """True if all ranks have finished."""
    clock_step: float = 0.0
    """Seconds by which the node's clock was set since the start: the start is so much later by the current setting."""
    at: float = 0.0
    read_at: float = 0.0
    """The same time as `at`, by the monotonic clock."""
    ended: float | None = None
    steps: float = 0.0
    cpus: int = 0
    """The number of CPUs that its ranks may use."""
    memory: float = 0.0
    """The peak resident memory of its ranks' own processes together, in bytes."""
    causes: dict[str, float] = field(default_factory=dict)
    """GPU seconds by cause; `none` is useful work."""
    judged: dict[str, float] = field(default_factory=dict)
    """GPU seconds by cause in the judge's last account, which the time after it is divided by."""
    pending: dict[str, float] = field(default_factory=dict)
    """GPU seconds by cause since the judge's last account, which are not in `causes` yet."""
    gpus: dict[str, GpuUse] = field(default_factory=dict)
    """GPUs by UUID."""
    ranks: dict[str, RankUse] = field(default_factory=dict)
    """Ranks by number: the present ones, and the last ones whose records are gone."""
    rank_count: int = 0
    """The largest number of ranks that were kept at once."""
    cpu_gone: float = 0.0
    """CPU seconds of ranks that are no longer kept."""
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The open findings."""

    @property
    def key(self) -> Run:
        """Return the run that it is the account of."""
        return (self.run, self.owner, self.training) if self.training else (self.run, self.owner)

    def update(self, look: Look, verdict: Verdict | None) -> list[dict[str, Any]]:
        """Add one poll. Return the findings that have ended since the last one."""
        readings = of_newest_start(look.readings[self.key])
        living = [one for one in readings if one.ended is None]
        elapsed = max(look.at - self.read_at, 0.0) if self.at else 0.0
        if self.at and look.at >= self.read_at:  # else the node was restarted
            self.clock_step += look.unix - self.at - elapsed
        self.at, self.read_at = look.unix, look.at
        self._divide(readings, verdict, is_over=not living)
        idle = {one.rank for one in readings} - {one.rank for one in living}
        if living and idle:
            add_seconds(self.causes, {"idle": elapsed * len(idle)})
        self._describe(look, readings)
        self._use(look.gpus, living, elapsed)
        return self._find(verdict, look)

    @property
    def node(self) -> str:
        """Return the node of its ranks; the first one if it has records of several nodes."""
        return next(iter(self.nodes), "")

    def gpu_seconds(self) -> dict[str, float]:
        """Return the GPU seconds by cause until the last poll; they sum to the whole time of the run's ranks."""
        seconds = dict(self.causes)
        add_seconds(seconds, self.pending)
        return seconds

    def describe(self, ranks: Sequence[Rank], resident: Mapping[int, float], cpus: int) -> None:
        """Add what the records on this node say, after an update.

        `resident` is the memory of each process in bytes, by pid, and `cpus` the number of CPUs that the ranks may use.
        """
        first = ranks[0]
        self.user, self.slurm = first.user, dict(first.snapshot.info.get("slurm", {}))
        for rank in ranks:
            if use := self.ranks.get(rank.key[1]):
                use.record = str(rank.snapshot.path)
        self.memory = max(self.memory, sum(resident.get(pid, 0.0) for pid in pids_of(ranks)))
        self.cpus = max(self.cpus, cpus)

    def _describe(self, look: Look, readings: Sequence[RankReading]) -> None:
        self.nodes = sorted({*self.nodes, *(one.node for one in readings)})[:NODES_LIMIT]
        self.world_size = max(one.world_size for one in readings)
        self.steps = max(self.steps, *(one.counters.steps for one in readings))
        offset = look.unix - look.at
        self.began = self.began or offset + min(one.began for one in readings)
        if self.has_finished and any(one.ended is None for one in readings):
            self.launched = 0.0
        self.launched = self.launched or offset + min(one.began for one in readings)
        self.has_finished = all(one.ended and one.ended.reason == "finished" for one in readings)
        ends = [one.ended.at for one in readings if one.ended]
        self.ended = offset + max(ends) if len(ends) == len(readings) else None

    def _divide(self, readings: Sequence[RankReading], verdict: Verdict | None, *, is_over: bool) -> None:
        """Divide the ranks' time since the last division by cause: by the judge's account if there is a new one."""
        if verdict and verdict.new_gpu_seconds:
            self.judged = {cause: part for cause, part in verdict.new_gpu_seconds.items() if cause != "idle"}
        self.pending = {}
        is_new_account = bool(verdict and verdict.new_gpu_seconds)
        total, judged = sum(self.judged.values()) if is_over or is_new_account else 0.0, 0.0
        undecided = verdict.undecided_seconds if verdict and not is_over else 0.0
        stalled = _stalled(readings) if verdict and any(one.kind in STANDSTILLS for one in verdict.findings) else 0.0
        for one in readings:
            use = self.ranks.get(str(one.rank))
            is_new = use is None or use.began != one.began
            if use is None or is_new:
                before = use.cpu_before + use.cpu if use else 0.0
                use = self.ranks[str(one.rank)] = RankUse(one.began, cpu_before=before)
            phases = _phase_seconds(one)
            spent = {name: max(now - use.divided.get(name, 0.0), 0.0) for name, now in phases.items()}
            if not (total or is_new or is_over or verdict is None):  # wait for the judge's next account
                add_seconds(self.pending, by_cause(spent, stalled))
                continue
            if total and not is_new:
                spent, rest = _split(spent, undecided)
                add_seconds(self.pending, by_cause(rest, stalled))
            use.divided = {name: use.divided.get(name, 0.0) + spent.get(name, 0.0) for name in phases}
            seconds = sum(spent.values())
            is_like_before = is_new_account or seconds < LIKE_BEFORE_SECONDS or "stall" in self.judged
            if total and not is_new and is_like_before:
                judged += seconds
            else:
                add_seconds(self.causes, by_cause(spent))
        # A series that vanishes would keep its last value in a report from a Prometheus.
        add_seconds(self.causes, dict.fromkeys(self.pending, 0.0))
        if judged:
            add_seconds(self.causes, {cause: judged * part / total for cause, part in self.judged.items()})
        self._forget_ranks({str(one.rank) for one in readings})

    def _forget_ranks(self, here: set[str]) -> None:
        gone = [number for number in self.ranks if number not in here]
        for number in gone[: max(len(gone) - GONE_LIMIT, 0)]:
            use = self.ranks.pop(number)
            self.cpu_gone += use.cpu + use.cpu_before
        self.rank_count = max(self.rank_count, len(self.ranks))

    def _use(self, gpus: Mapping[str, RankGpu], living: Iterable[RankReading], elapsed: float) -> None:
        for uuid, node in {one.uuid: one.node for one in living}.items():
            if gpu := gpus.get(uuid):
                is_known = uuid in self.gpus
                use = self.gpus.setdefault(uuid, GpuUse(node, gpu.reading.index))
                use.update(elapsed if is_known else 0.0, gpu)
        for one in living:
            used = (one.counters.process.cpu or 0.0) + (one.counters.process.workers_cpu or 0.0)
            rank = self.ranks[str(one.rank)]
            rank.cpu = max(rank.cpu, used)

    def _find(self, verdict: Verdict | None, look: Look) -> list[dict[str, Any]]:
        found = {}
        for finding in verdict.findings if verdict else ():
            key = f"{finding.kind} {finding.candidate.cause} {finding.candidate.place.rank_label}"
            found[key] = self._entry(finding, look, self.findings.get(key, {}))
        ended = [{**entry, "end": self.at} for key, entry in self.findings.items() if key not in found]
        self.findings = found
        return ended

    def _entry(self, finding: Finding, look: Look, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return a finding with its largest ratio, which its sentence names, and its mean ratio."""
        current = finding.candidate
        candidate = replace(current, ratio=max(current.ratio, before.get("ratio", 0.0)))
        polls = before.get("polls", 0) + 1
        return {
            "run": self.run,
            "owner": self.owner,
            "training": self.training,
            "begin": look.unix - look.at + finding.since,
            "kind": candidate.kind,
            "cause": candidate.cause,
            "severity": finding.severity,
            **candidate.place._asdict(),
            "rank": candidate.place.rank_label,
            "ratio": candidate.ratio,
            "mean": before.get("mean", 0.0) + (current.ratio - before.get("mean", 0.0)) / polls,
            "polls": polls,
            "sentence": words.sentence(self.key, candidate),
            "advice": words.advice(candidate),
        }


SAVED = TypeAdapter(Account)


def account_from_json(state: Mapping[str, Any]) -> Account:
    """Return an account from its `asdict`. Raise one of saved.UNREADABLE if it is damaged.

    Its pending time is divided again by the next update.
    """
    json.dumps(state, allow_nan=False)  # raises a ValueError for a number that is not finite
    account = SAVED.validate_python({"launched": state["began"], **state, "pending": {}})
    defaults = {**Place()._asdict(), "polls": 1}
    account.findings = {key: {**defaults, "mean": one["ratio"], **one} for key, one in account.findings.items()}
    return account


def pids_of(ranks: Iterable[Rank]) -> set[int]:
    """Return the pids of the ranks' processes, as far as they are known."""
    return {rank.snapshot.lock_pid for rank in ranks if rank.snapshot.lock_pid}


def _phase_seconds(one: RankReading) -> dict[str, float]:
    """Return a rank's seconds by phase. If it has ended, its open phase lasted until then."""
    phases = dict(one.counters.phases)
    if one.ended:
        phases[one.phase] = phases.get(one.phase, 0.0) + max(one.ended.at - one.began - sum(phases.values()), 0.0)
    return phases


def _stalled(readings: Iterable[RankReading]) -> float:
    """Return the seconds since the last progress of any living rank."""
    return min((one.at - one.last_progress for one in readings if not one.ended), default=0.0)


def _split(spent: Mapping[str, float], last: float) -> tuple[dict[str, float], dict[str, float]]:
    """Divide seconds by phase into those before the last ones, and as many of each phase for the `last` seconds."""
    whole = sum(spent.values())
    part = min(last / whole, 1.0) if whole else 0.0
    return {name: one * (1.0 - part) for name, one in spent.items()}, {name: one * part for name, one in spent.items()}


def _add_increase(total: float | None, before: float | None, now: float | None) -> float | None:
    """Return a total plus the increase of a counter; None until it is first known."""
    return total if now is None else (total or 0.0) + (increase(now, before) or 0.0)
