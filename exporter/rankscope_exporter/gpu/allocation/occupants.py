"""Whether a rank may be on the GPU that its record names: by the GPUs of this node and the processes on them.

A record is its owner's word. It is believed unless it is contradicted: the node has no such GPU, or only processes of
others are on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankscope_exporter.gpu.allocation.processes import ProcessTable, Seen
from rankscope_exporter.ranks.rank import Rank

STALE_AFTER = 5.0  # seconds, as of GPUs' readings
MPS_SERVER = "nvidia-cuda-mps"  # holds the GPU for its clients, which the driver may not list


@dataclass(frozen=True)
class _Occupants:
    since: float
    pids: frozenset[int]
    uids: frozenset[int]


class Occupants:
    """Who was seen on each GPU last. The threads of the GPUs write here, and that of the ranks reads."""

    def __init__(self, processes: ProcessTable, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._monotonic = monotonic
        self._by_uuid: dict[str, _Occupants] = {}
        self._parents: dict[str, str] = {}
        self._uids: dict[int, int | None] = {}  # of ranks' processes, as looked up since a GPU was seen last
        self.lacks: Callable[[str], bool] = lambda _uuid: False
        """Whether no GPU of this node has the UUID; False while that is not known."""

    def see(self, uuid: str, seen: Seen, instances: Iterable[str] = ()) -> None:
        """Note what is on a GPU now, and the UUIDs of its MIG instances.

        Where one process cannot be looked up, or holds the GPU for others, nothing is known.
        """
        self._uids = {}
        self._parents |= dict.fromkeys(instances, uuid)
        living = [process for process in seen.living if process and process.name != MPS_SERVER]
        if living and len(living) == len(seen.living):
            pids, uids = ({process.pid for process in living}, {process.uid for process in living})
            self._by_uuid[uuid] = _Occupants(self._monotonic(), frozenset(pids), frozenset(uids))
        else:
            self._by_uuid.pop(uuid, None)

    def is_elsewhere(self, rank: Rank) -> bool:
        """Return whether the rank cannot be on the GPU, or the MIG instance, that it names."""
        uuid = rank.snapshot.info["uuid"]
        gpu = self._parents.get(uuid, uuid)
        return self.lacks(gpu) or self._are_others(rank, gpu)

    def _are_others(self, rank: Rank, gpu: str) -> bool:
        """Return whether the GPU has processes, and none is the rank's or of a user of the rank's.

        That is the record's owner, or whose process holds its lock: a file that was written through an idmapped mount,
        as in a pod with a user namespace, belongs to another than its process.
        """
        there = self._by_uuid.get(gpu)
        if there is None or self._monotonic() - there.since > STALE_AFTER:
            return False
        pid = rank.snapshot.lock_pid
        return not (rank.owner in there.uids or pid in there.pids or self._uid(pid) in there.uids)

    def _uid(self, pid: int) -> int | None:
        """Look up each process once, whatever number of records it holds."""
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
