"""What the ranks' processes use, seen from outside: processor, run queue, storage, memory, loader workers.

The process is the one that holds the lock of the rank's record: its pid comes from the kernel, in this process's pid
namespace and without a chance that it is another's by now. Where the rank's is not visible here all this is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.ranks.metric import rank_metrics
from rankscope_exporter.ranks.process_usage import PROCFS, Usage, read_usage
from rankscope_exporter.ranks.rank import Key, Rank, Scan

CHILDREN_LIMIT = 2048  # read in a poll: three files each, which takes 0.1 s
OWNER_CHILDREN_LIMIT = 1024  # of one owner: 8 ranks with two loaders of 64 workers


@dataclass
class RankProcess:
    """Counters of one rank's record, which never go back; and the last usage that was read."""

    cache: SampleCache[RankProcess]
    usage: Usage | None = None
    cpu: dict[str, float] = field(default_factory=dict)
    read_bytes: float | None = None
    workers_run_queue: float | None = None
    _waits: Mapping[int, float] = field(default_factory=dict)
    """Of each child, by pid, when children were read last."""

    def update(self, usage: Usage | None) -> None:
        """Take a newer usage. Figures of children can go back for a moment: when one has just ended."""
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
        # A new worker's first reading counts from 0. One that goes back is another process with the same pid.
        added = [waited - self._waits.get(pid, 0.0) for pid, waited in now.items()]
        self._waits = now
        if now or self.workers_run_queue is not None:
            self.workers_run_queue = (self.workers_run_queue or 0.0) + sum(max(wait, 0.0) for wait in added)

    def _raise(self, name: str, value: float) -> None:
        self.cpu[name] = max(value, self.cpu.get(name, 0.0))


def _seen(process: RankProcess) -> RankProcess | None:
    """None of a process that cannot be seen now: what was counted of it is absent until it can."""
    return process if process.usage else None


def _with_children(process: RankProcess) -> RankProcess | None:
    """None also of a process whose children were not read now."""
    return process if process.usage and not process.usage.unread_children else None


def _cpu(process: RankProcess) -> Values:
    return process.cpu if _with_children(process) else {"training": process.cpu["training"]}


def _usage(process: RankProcess) -> Usage | None:
    return process.usage


COUNTED = rank_metrics(_seen)
CHILDREN = rank_metrics(_with_children)
USAGE = rank_metrics(_usage)
METRICS = (
    COUNTED.counter(
        "cpu_seconds_total",
        "Processor time of the rank's process (`training`, all its threads) and of its child processes (`workers`: "
        "the loader's, mostly).",
        _cpu,
        "who",
    ),
    USAGE.counter(
        "run_queue_seconds_total",
        "Time that the main thread of the rank could have run and had no processor.",
        lambda usage: usage.run_queue,
    ),
    CHILDREN.counter(
        "workers_run_queue_seconds_total",
        "Time that the main threads of its child processes could have run and had no processor: with their processor "
        "time, what they would have computed on a machine of their own.",
        lambda process: process.workers_run_queue,
    ),
    CHILDREN.counter(
        "read_bytes_total",
        "Bytes that the rank and its child processes read from storage, not from the page cache; absent where the "
        "exporter may not know.",
        lambda process: process.read_bytes,
    ),
    USAGE.gauge(
        "child_processes", "Child processes of the rank: loader workers, mostly.", lambda usage: usage.children
    ),
    USAGE.gauge(
        "child_processes_unread",
        "Child processes that are not read because there are too many: more than 1,024 of one owner, or than the "
        "owner's share of 2,048 on the node. Then the CPU time of `workers`, their time in the run queue and the bytes "
        "read are absent. Absent while all are read.",
        lambda usage: usage.unread_children or None,
    ),
    USAGE.gauge(
        "resident_memory_bytes",
        "Resident memory of the rank's process, without its children's.",
        lambda usage: usage.resident,
    ),
)


class RankProcesses:
    """Reads procfs: some files for each process, and for each of its workers up to a limit."""

    name = "rank_processes"
    help = "training ranks' processes: processor, run queue, storage, memory, workers"
    metrics = METRICS

    def __init__(self, procfs: Path = PROCFS) -> None:
        self._procfs = procfs
        self._processes: dict[tuple[Path, float, Key], RankProcess] = {}
        self._usage_by_pid: Mapping[int, Usage | None] = {}

    def processes(self) -> Mapping[Key, RankProcess]:
        """Return what the last poll has read, by rank."""
        return {key: process for (_, _, key), process in self._processes.items()}

    def resident(self) -> Mapping[int, float]:
        """Return the bytes that each process had resident at the last poll, by its pid."""
        return {pid: usage.resident for pid, usage in self._usage_by_pid.items() if usage}

    def poll(self, scan: Scan) -> list[Metric]:
        """Of every living rank whose process can be seen."""
        usages = self._usage_by_pid = self._usages([rank for rank in scan.ranks if rank.snapshot.lock_pid])
        known, self._processes = self._processes, {}
        for rank in scan.ranks:
            if rank.snapshot.lock_pid:
                identity = rank.snapshot.path, rank.snapshot["started_monotonic"], rank.key
                process = self._processes[identity] = known.get(identity) or RankProcess(SampleCache(METRICS, rank.key))
                process.update(usages[rank.snapshot.lock_pid])
        return families(METRICS, [process.cache.write(process) for process in self._processes.values()])

    def _usages(self, ranks: Sequence[Rank]) -> dict[int, Usage | None]:
        """Read each process once, whatever number of records it holds. Each owner has the same share of children."""
        owners = {rank.owner for rank in ranks}
        share = min(OWNER_CHILDREN_LIMIT, CHILDREN_LIMIT // max(1, len(owners)))
        left = dict.fromkeys(owners, share)
        usages: dict[int, Usage | None] = {}
        for rank in ranks:
            pid = rank.snapshot.lock_pid
            if pid not in usages:
                usages[pid] = usage = self._usage(pid, left[rank.owner])
                left[rank.owner] -= (usage.children or 0) - usage.unread_children if usage else 0
        return usages

    def _usage(self, pid: int, children_limit: int) -> Usage | None:
        try:
            return read_usage(pid, self._procfs, children_limit)
        except OSError:  # it has ended since, or is hidden
            return None
