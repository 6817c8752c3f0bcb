"""Resources that the ranks' processes use, from procfs: CPU time, run queue, storage, memory, loader workers.

A rank's process is the one that holds the lock of its record. The kernel reports its pid in this process's pid
namespace, so it cannot belong to another process by now. If it is not visible here, the metrics are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from prometheus_client.core import Metric

from rankscope.record.snapshot import RankSnapshot
from rankscope.record.stopped import CGROUPS, is_frozen
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.ranks.metric import rank_metrics
from rankscope_exporter.ranks.principals import principal
from rankscope_exporter.ranks.process_usage import PROCFS, Usage, read_usage
from rankscope_exporter.ranks.rank import Key, Rank, Scan

CHILDREN_LIMIT = 2048  # per poll: three or four files each, which takes 0.1 s
OWNER_CHILDREN_LIMIT = 1024  # per owner: 8 ranks with two loaders of 64 workers
STOPPED_AFTER = 5.0  # seconds without progress; a debugger or a profiler stops a process for a moment
STARTUP_GENERATIONS = 4  # before a rank's first step: compilers run in its children's children


@dataclass
class RankProcess:
    """The counters of one rank's process, which never decrease, and its last usage."""

    cache: SampleCache[RankProcess]
    usage: Usage | None = None
    cpu: dict[str, float] = field(default_factory=dict)
    read_bytes: float | None = None
    workers_run_queue: float | None = None
    is_stopped: bool = False
    """True if the kernel does not run it, by a signal, a debugger or a cgroup's freezer, and it makes no progress."""
    _waits: Mapping[int, float] = field(default_factory=dict)
    """The run queue seconds of each child at the last reading, by pid."""

    def update(self, usage: Usage | None) -> None:
        """Add a newer usage. Values of children can decrease for a moment when a child has just ended."""
        self.usage = usage
        if usage is None:
            return
        if not usage.unread_children:
            self._add_waits(usage.children_run_queue)
        self._raise("training", usage.cpu)
        if usage.children_cpu is not None:
            self._raise("workers", usage.children_cpu)
        if usage.read_bytes is not None:
            self.read_bytes = max(usage.read_bytes, self.read_bytes or 0.0)

    def _add_waits(self, now: Mapping[int, float]) -> None:
        # A new worker's first reading counts from 0. A decrease means another process with the same pid.
        added = [seconds - self._waits.get(pid, 0.0) for pid, seconds in now.items()]
        self._waits = now
        if now or self.workers_run_queue is not None:
            self.workers_run_queue = (self.workers_run_queue or 0.0) + sum(max(wait, 0.0) for wait in added)

    def _raise(self, name: str, value: float) -> None:
        self.cpu[name] = max(value, self.cpu.get(name, 0.0))


def _visible(process: RankProcess) -> RankProcess | None:
    """Return the process; None while it is not visible, so that its counters are absent."""
    return process if process.usage else None


def _with_children(process: RankProcess) -> RankProcess | None:
    """Return the process; None if it is not visible or its children were not read."""
    return process if process.usage and not process.usage.unread_children else None


def _cpu(process: RankProcess) -> Values:
    return process.cpu if _with_children(process) else {"training": process.cpu["training"]}


def _usage(process: RankProcess) -> Usage | None:
    return process.usage


COUNTED = rank_metrics(_visible)
CHILDREN = rank_metrics(_with_children)
USAGE = rank_metrics(_usage)
METRICS = (
    COUNTED.counter(
        "cpu_seconds_total",
        "CPU time of the rank's process (`training`, all threads) and of its child processes (`workers`, mostly of the "
        "loader).",
        _cpu,
        "who",
    ),
    USAGE.counter(
        "run_queue_seconds_total",
        "Time that the rank's main thread was runnable and waited for a CPU.",
        lambda usage: usage.run_queue,
    ),
    CHILDREN.counter(
        "workers_run_queue_seconds_total",
        "Time that the main threads of the child processes were runnable and waited for a CPU. Added to their CPU "
        "time, it is the CPU time that they need.",
        lambda process: process.workers_run_queue,
    ),
    CHILDREN.counter(
        "read_bytes_total",
        "Bytes that the rank and its child processes read from storage, not from the page cache; absent if the "
        "exporter has no access.",
        lambda process: process.read_bytes,
    ),
    USAGE.gauge("child_processes", "Child processes of the rank, mostly loader workers.", lambda usage: usage.children),
    USAGE.gauge(
        "child_processes_unread",
        "Child processes that are not read because there are too many: more than 1,024 of one owner, or more than the "
        "owner's share of 2,048 on the node. Then the workers' CPU time and run queue time and the bytes read are "
        "absent. Absent while all are read.",
        lambda usage: usage.unread_children or None,
    ),
    USAGE.gauge(
        "resident_memory_bytes",
        "Resident memory of the rank's process, without its children.",
        lambda usage: usage.resident,
    ),
)


class RankProcesses:
    """The collector of processes: reads procfs for each rank and for its workers, up to a limit."""

    name = "rank_processes"
    help = "training ranks' processes: CPU, run queue, storage, memory, workers"
    metrics = METRICS

    def __init__(self, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> None:
        self._procfs, self._cgroups = procfs, cgroups
        self._processes: dict[tuple[Path, float, Key], RankProcess] = {}
        self.found: Mapping[Key, RankProcess] = {}
        """The last poll's result by rank, for any thread: a poll replaces it and does not change it."""

    def poll(self, scan: Scan) -> list[Metric]:
        """Read the process of every living rank."""
        usages = self._usages([rank for rank in scan.ranks if rank.snapshot.lock_pid])
        known, self._processes = self._processes, {}
        frozen = cache(lambda pid: is_frozen(pid, self._procfs, self._cgroups))  # a process may have many records
        for rank in scan.ranks:
            if rank.snapshot.lock_pid:
                identity = rank.snapshot.path, rank.snapshot["started_monotonic"], rank.key
                process = self._processes[identity] = known.get(identity) or RankProcess(SampleCache(METRICS, rank.key))
                process.update(usages[rank.snapshot.lock_pid])
                process.is_stopped = _is_stopped(rank.snapshot, process.usage, frozen)
        self.found = {key: replace(one, cpu={**one.cpu}) for (_, _, key), one in self._processes.items()}
        return families(METRICS, [process.cache.write(process) for process in self._processes.values()])

    def _usages(self, ranks: Sequence[Rank]) -> dict[int, Usage | None]:
        """Read each process once, even if it holds several records. Each owner has the same share of children."""
        owners = {principal(rank.owner) for rank in ranks}
        share = min(OWNER_CHILDREN_LIMIT, CHILDREN_LIMIT // max(1, len(owners)))
        left = dict.fromkeys(owners, share)
        usages: dict[int, Usage | None] = {}
        for rank in ranks:
            pid, owner = rank.snapshot.lock_pid, principal(rank.owner)
            if pid not in usages:
                generations = 1 if rank.snapshot["steps"] else STARTUP_GENERATIONS
                usages[pid] = usage = self._usage(pid, left[owner], generations)
                left[owner] -= usage.descendants if usage else 0
        return usages

    def _usage(self, pid: int, children_limit: int, generations: int) -> Usage | None:
        try:
            return read_usage(pid, self._procfs, children_limit, generations=generations)
        except OSError:  # it has ended, or is hidden
            return None


def _is_stopped(snapshot: RankSnapshot, usage: Usage | None, frozen: Callable[[int], bool]) -> bool:
    if usage is None or snapshot.read_monotonic - snapshot.last_progress < STOPPED_AFTER:
        return False
    return usage.is_stopped or frozen(snapshot.lock_pid)
