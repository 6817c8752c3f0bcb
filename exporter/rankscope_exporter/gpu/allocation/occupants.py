"""Check of the GPU that a rank's record names against the GPUs of this node and the processes on them.

A record is its owner's claim. It is accepted unless the node has no such GPU, or only other users' processes are on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankscope_exporter.gpu.allocation.processes import GpuProcesses, ProcessTable
from rankscope_exporter.ranks.rank import Rank

STALE_AFTER = 5.0  # seconds, as for GPU readings
MPS_SERVER = "nvidia-cuda-mps"  # holds the GPU for its clients, which the driver may not list


@dataclass(frozen=True)
class _Occupants:
    since: float
    pids: frozenset[int]
    uids: frozenset[int]


class Occupants:
    """The last known users of each GPU. The GPU threads write it, and the thread of the ranks reads it."""

    def __init__(self, processes: ProcessTable, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._monotonic = monotonic
        self._by_uuid: dict[str, _Occupants] = {}
        self._parents: dict[str, str] = {}
        self._uids: dict[int, int | None] = {}  # uids of ranks' processes, cached until the next GPU reading
        self.lacks: Callable[[str], bool] = lambda _uuid: False
        """Returns whether no GPU of this node has the UUID; False while that is unknown."""

    def record(self, uuid: str, seen: GpuProcesses, instances: Iterable[str] = ()) -> None:
        """Record the processes on a GPU and the UUIDs of its MIG instances.

        If any process cannot be looked up or serves clients (MPS), the users of the GPU are unknown.
        """
        self._uids = {}
        self._parents |= dict.fromkeys(instances, uuid)
        living = [process for process in seen.living if process and process.name != MPS_SERVER]
        if living and len(living) == len(seen.living):
            pids, uids = ({process.pid for process in living}, {process.uid for process in living})
            self._by_uuid[uuid] = _Occupants(self._monotonic(), frozenset(pids), frozenset(uids))
        else:
            self._by_uuid.pop(uuid, None)

    def has_instance(self, uuid: str) -> bool:
        """Return whether a GPU of this node has shown this MIG instance."""
        return uuid in self._parents

    def is_elsewhere(self, rank: Rank) -> bool:
        """Return whether the rank cannot be on the GPU or MIG instance that its record names."""
        uuid = rank.snapshot.info["uuid"]
        gpu = self._parents.get(uuid, uuid)
        return self.lacks(gpu) or self._has_only_other_users(rank, gpu)

    def _has_only_other_users(self, rank: Rank, gpu: str) -> bool:
        """Return whether the GPU has processes, and none is the rank's or belongs to one of the rank's users.

        These are the record's owner and the user of the process that holds the record's lock. They differ if the
        record is written through an idmapped mount, as in a pod with a user namespace.
        """
        occupants = self._by_uuid.get(gpu)
        if occupants is None or self._monotonic() - occupants.since > STALE_AFTER:
            return False
        pid = rank.snapshot.lock_pid
        return not (rank.owner in occupants.uids or pid in occupants.pids or self._uid(pid) in occupants.uids)

    def _uid(self, pid: int) -> int | None:
        """Return the process's uid. Each process is looked up once, even if it has several records."""
        uids = self._uids
        if pid not in uids:
            uids[pid] = self._look_up(pid)
        return uids[pid]

    def _look_up(self, pid: int) -> int | None:
        try:
            process = self._processes.find(pid) if pid else None
        except OSError:
            return None
        return process.uid if process else None
