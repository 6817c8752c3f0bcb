"""What each run's GPU time went to since its ranks began, for the report at its end: the parts sum to the whole.

The whole is the time of its ranks, by the counters of their records, and that of GPUs whose rank has ended while others
live. The judge divides what it has seen. What it has not seen, such as the start-up before the record appeared or a run
that has ranks on other nodes, is divided by the phases of the ranks' own clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from rankscope_exporter.diagnosis import words
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.lost import by_cause
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks import journal
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.process_usage import PROCFS, allowed_cpus
from rankscope_exporter.ranks.rank import Rank

GONE_LIMIT = 16
"""Ranks of a run that are kept though their records are gone: one that comes back would be counted twice. A run may
have new numbers for as long as it lives."""
NODES_LIMIT = 64
CAUSES_LIMIT = 64
"""Causes of one run that are counted by name; the rest is `other`, as a script can rename its phases often."""


def add_seconds(seconds: dict[str, float], spent: Mapping[str, float]) -> None:
    """Add GPU seconds by cause, at most CAUSES_LIMIT of them by their names."""
    for cause, more in spent.items():
        counted = cause if cause in seconds or len(seconds) < CAUSES_LIMIT else "other"
        seconds[counted] = seconds.get(counted, 0.0) + more


@dataclass
class GpuUse:
    """One GPU while ranks of the run lived on it. None is not known."""

    node: str = ""
    index: str = ""
    seconds: float = 0.0
    busy: float | None = None
    """Seconds in which a kernel ran."""
    joules: float | None = None
    memory: float | None = None
    """Bytes that were in use at most."""
    memory_total: float | None = None
    busy_counter: float | None = None
    joules_counter: float | None = None

    def update(self, seconds: float, gpu: RankGpu) -> None:
        """Take what the GPU says now, so many seconds after the last time."""
        self.seconds += seconds
        self.busy = _increased(self.busy, self.busy_counter, gpu.counters.busy)
        self.joules = _increased(self.joules, self.joules_counter, gpu.joules)
        self.busy_counter, self.joules_counter = gpu.counters.busy, gpu.joules
        if gpu.memory:
            self.memory = max(gpu.memory.used, self.memory or 0.0)
            self.memory_total = float(gpu.memory.total)


@dataclass
class RankUse:
    """One rank."""

    began: float
    """When the process began that it is now, by the monotonic clock."""
    divided: dict[str, float] = field(default_factory=dict)
    """Seconds of that process by phase that have been divided."""
    cpu: float = 0.0
    """CPU seconds of that process and its loader workers."""
    cpu_before: float = 0.0
    """Of the processes before."""


@dataclass
class Account:
    """Of one run. Times are unix seconds."""

    run: str
    owner: str
    user: str = ""
    slurm: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    world_size: int = 0
    began: float = 0.0
    """Never changes: with run and owner, it names the account."""
    at: float = 0.0
    read_at: float = 0.0
    """By the monotonic clock."""
    ended: float | None = None
    steps: float = 0.0
    cpus: int = 0
    """That its ranks may use."""
    memory: float = 0.0
    """Bytes that its ranks' own processes had resident at most, together."""
    causes: dict[str, float] = field(default_factory=dict)
    """GPU seconds; `none` is useful work."""
    judged: dict[str, float] = field(default_factory=dict)
    """GPU seconds by cause of the last seconds that the judge has divided, for those after them."""
    gpus: dict[str, GpuUse] = field(default_factory=dict)
    """By UUID."""
    ranks: dict[str, RankUse] = field(default_factory=dict)
    """By number: those that are here, and the last ones that were."""
    rank_count: int = 0
    """The most that were kept at once."""
    cpu_gone: float = 0.0
    """CPU seconds of ranks that are not kept any more."""
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those that hold now."""

    def update(self, look: Look, ranks: Sequence[Rank], verdict: Verdict | None) -> list[dict[str, Any]]:
        """Take one poll; return the findings that have ended since the last."""
        readings = look.readings[self.run, self.owner]
        living = [one for one in readings if one.ended is None]
        elapsed = max(look.at - self.read_at, 0.0) if self.at else 0.0
        self.at, self.read_at = look.unix, look.at
        self._divide(readings, verdict, is_over=not living)
        idle = {one.rank for one in readings} - {one.rank for one in living}
        if living and idle:
            add_seconds(self.causes, {"idle": elapsed * len(idle)})
        self._describe(look, ranks, readings)
        self._use(look.gpus, living, elapsed)
        return self._find(verdict, look)

    def _describe(self, look: Look, ranks: Sequence[Rank], readings: Sequence[RankReading]) -> None:
        first = ranks[0]
        self.user, self.slurm = first.user, dict(first.snapshot.info.get("slurm", {}))
        self.nodes = sorted({*self.nodes, *(one.node for one in readings)})[:NODES_LIMIT]
        self.world_size = max(one.world_size for one in readings)
        self.steps = max(self.steps, *(one.counters.steps for one in readings))
        offset = look.unix - look.at
        self.began = self.began or offset + min(one.began for one in readings)
        ends = [one.ended.at for one in readings if one.ended]
        self.ended = offset + max(ends) if len(ends) == len(readings) else None

    def _divide(self, readings: Sequence[RankReading], verdict: Verdict | None, *, is_over: bool) -> None:
        """Divide what the ranks have spent since this was done last: as the judge does, where it has just done so."""
        if verdict and verdict.newly_spent:
            self.judged = {cause: part for cause, part in verdict.newly_spent.items() if cause != "idle"}
        parts = self.judged if is_over or (verdict and verdict.newly_spent) else {}
        total, judged = sum(parts.values()), 0.0
        for one in readings:
            use = self.ranks.get(str(one.rank))
            is_new = use is None or use.began != one.began
            if use is None or is_new:
                before = use.cpu_before + use.cpu if use else 0.0
                use = self.ranks[str(one.rank)] = RankUse(one.began, cpu_before=before)
            if not (total or is_new or is_over or verdict is None):
                continue  # the judge will do so
            lived = _lived(one)
            spent = {name: max(now - use.divided.get(name, 0.0), 0.0) for name, now in lived.items()}
            use.divided = lived
            if total and not is_new:
                judged += sum(spent.values())
            else:
                add_seconds(self.causes, by_cause(spent))
        if judged:
            add_seconds(self.causes, {cause: judged * part / total for cause, part in parts.items()})
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
            key = f"{finding.kind} {finding.candidate.place.rank}"
            found[key] = self._entry(finding, look)
            found[key]["ratio"] = max(finding.candidate.ratio, self.findings.get(key, found[key])["ratio"])
        ended = [{**entry, "end": self.at} for key, entry in self.findings.items() if key not in found]
        self.findings = found
        return ended

    def _entry(self, finding: Finding, look: Look) -> dict[str, Any]:
        candidate = finding.candidate
        return {
            "run": self.run,
            "owner": self.owner,
            "begin": look.unix - look.at + finding.since,
            "kind": candidate.kind,
            "cause": candidate.cause,
            "severity": finding.severity,
            "rank": candidate.place.rank,
            "node": candidate.place.node,
            "gpu": candidate.place.gpu,
            "ratio": candidate.ratio,
            "sentence": words.sentence((self.run, self.owner), candidate),
            "advice": words.advice(candidate),
        }


class Accounts:
    """The accounts of the runs that are here, kept with the exporter's state; those that have ended, in the journal."""

    def __init__(self, directory: Path, procfs: Path = PROCFS) -> None:
        self._journal = journal.Journal(directory)
        self._procfs = procfs
        self._accounts: dict[Run, Account] = {}
        self._saved: dict[Run, Account] = {}
        """Of runs that have not been seen since the start."""
        self._allowed: dict[int, frozenset[int]] = {}
        """CPUs by the process that may use them."""

    def update(self, look: Look, resident: Mapping[int, float]) -> None:
        """Take one poll. `resident` is the memory of each process in bytes, by its pid."""
        ranks: dict[Run, list[Rank]] = defaultdict(list)
        for rank in look.scan.ranks:
            ranks[rank.key[0], rank.key[2]].append(rank)
        verdicts = {verdict.run: verdict for verdict in look.judged.verdicts}
        pids = {rank.snapshot.lock_pid for rank in look.scan.ranks if rank.snapshot.lock_pid}
        self._allowed = {pid: self._allowed.get(pid) or allowed_cpus(pid, self._procfs) for pid in pids}
        for run, members in ranks.items():
            if run not in self._accounts:
                saved = self._saved.pop(run, None)
                self._accounts[run] = saved or Account(*run)
            self._update(self._accounts[run], look, members, verdicts.get(run), resident)
        self._accounts = {run: self._accounts[run] for run in ranks}
        self._finish_lost()

    def _finish_lost(self) -> None:
        """Note runs whose records are gone, as after a reboot: they ended when they were last seen."""
        for account in self._saved.values():
            if account.ended is None:
                self._journal.append(account.owner, {**_finished(account), "ended": account.at})
        self._saved = {}

    def _update(
        self, account: Account, look: Look, ranks: list[Rank], verdict: Verdict | None, resident: Mapping[int, float]
    ) -> None:
        was_over = account.ended is not None
        for entry in account.update(look, ranks, verdict):
            self._journal.append(account.owner, {"entry": journal.FOUND, **entry})
        pids = {rank.snapshot.lock_pid for rank in ranks if rank.snapshot.lock_pid}
        account.memory = max(account.memory, sum(resident.get(pid, 0.0) for pid in pids))
        account.cpus = max(account.cpus, len(frozenset().union(*(self._allowed[pid] for pid in pids))))
        if account.ended is not None and not was_over:
            self._journal.append(account.owner, _finished(account))

    def state(self) -> list[Any]:
        """Return what has to be saved, as JSON can hold it."""
        return [asdict(account) for account in self._accounts.values()]

    def restore(self, state: Iterable[Any]) -> None:
        """Take it back. Raises an error of history.UNREADABLE for anything else."""
        self._saved = {(account.run, account.owner): account for account in map(restored, state)}


def _finished(account: Account) -> dict[str, Any]:
    """Return the journal's entry: without what only a run that goes on needs, of which a script makes much."""
    entry = {"entry": journal.FINISHED, **asdict(account), "judged": {}}
    for use in entry["ranks"].values():
        use["divided"] = {}
    return entry


def restored(state: Mapping[str, Any]) -> Account:
    """Return an account from what `asdict` made of it. Raises an error of history.UNREADABLE for anything else."""
    account = Account(str(state["run"]), str(state["owner"]), str(state["user"]), {**state["slurm"]})
    account.nodes, account.world_size, account.cpus = (
        [*map(str, state["nodes"])],
        int(state["world_size"]),
        int(state["cpus"]),
    )
    account.began, account.at, account.read_at, account.steps, account.memory = (
        _number(state[name]) or 0.0 for name in ("began", "at", "read_at", "steps", "memory")
    )
    account.ended, account.cpu_gone = _number(state["ended"]), _number(state["cpu_gone"]) or 0.0
    account.rank_count = int(state["rank_count"])
    account.causes, account.judged = _numbers(state["causes"]), _numbers(state["judged"])
    for uuid, use in state["gpus"].items():
        numbers = {name: _number(value) for name, value in use.items() if name not in ("node", "index")}
        seconds = numbers.pop("seconds") or 0.0
        account.gpus[uuid] = GpuUse(str(use["node"]), str(use["index"]), seconds, **numbers)
    for rank, use in state["ranks"].items():
        account.ranks[rank] = RankUse(
            float(use["began"]), _numbers(use["divided"]), float(use["cpu"]), float(use["cpu_before"])
        )
    account.findings = {key: {**entry, "ratio": float(entry["ratio"])} for key, entry in state["findings"].items()}
    return account


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(value) or 0.0 for name, value in values.items()}


def _number(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is not None and not isfinite(number):
        raise ValueError(f"{value!r} is no number of an account")
    return number


def _lived(one: RankReading) -> dict[str, float]:
    """Return its seconds by phase; of a rank that has ended, the phase that was open lasted until then."""
    phases = dict(one.counters.phases)
    if one.ended:
        phases[one.phase] = phases.get(one.phase, 0.0) + max(one.ended.at - one.began - sum(phases.values()), 0.0)
    return phases


def _increased(total: float | None, before: float | None, now: float | None) -> float | None:
    """Return a total with what a counter has increased by; one that has decreased began again."""
    if now is None:
        return total
    if before is None:
        return total or 0.0
    return (total or 0.0) + (now - before if now >= before else now)
