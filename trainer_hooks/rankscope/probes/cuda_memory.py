"""CUDA's caching allocator: allocated and reserved memory, and how often it ran out.

Read at a step's end, at most once a second, once CUDA is in use. torch copies the allocator's counters under its lock
(`DeviceCachingAllocator::getStats` in c10/cuda/CUDACachingAllocator.cpp), without a driver call or a synchronization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

ALLOCATED = INDEX["cuda_allocated_bytes"]
RESERVED = INDEX["cuda_reserved_bytes"]
PEAK = INDEX["cuda_peak_allocated_bytes"]
RETRIES = INDEX["cuda_allocation_retries"]
OUT_OF_MEMORY = INDEX["cuda_out_of_memory"]

Read = Callable[[], Mapping[str, Any]]


class AllocatorReader:
    """Copies the allocator's counters into the record. `read` returns them; empty while CUDA is not in use."""

    def __init__(self, timeline: Timeline, read: Read) -> None:
        self._timeline = timeline
        self._read = read

    def poll(self) -> None:
        """Copy the counters; the peak only if it is higher, because the script may reset torch's."""
        stats = self._read()
        if not stats:
            return
        slots = self._timeline.writer.slots
        allocated = stats["allocated_bytes"]["all"]
        slots[ALLOCATED] = allocated["current"]
        slots[PEAK] = max(slots[PEAK], allocated["peak"])
        slots[RESERVED] = stats["reserved_bytes"]["all"]["current"]
        slots[RETRIES] = stats["num_alloc_retries"]
        slots[OUT_OF_MEMORY] = stats["num_ooms"]


def read_device(index: int | None) -> Mapping[str, Any]:
    """Return a device's counters, by default the current one's; empty if CUDA is not in use. Initializes nothing."""
    return torch.cuda.memory_stats_as_nested_dict(index)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Add the reader to the polls of a step."""
    poll: Any = guard(AllocatorReader(timeline, lambda: read_device(timeline.job.device)).poll)
    timeline.steps.polls.append(poll)
    return [lambda: timeline.steps.polls.remove(poll)]
