"""CUDA's caching allocator: what living tensors take, what it holds, and how often it ran short.

Asked at a step's end, at most once a second, and only once CUDA is in use. The answer is a copy of the allocator's own
counters, taken under its lock (`DeviceCachingAllocator::getStats` in torch's c10/cuda/CUDACachingAllocator.cpp): no
call of the driver's, nothing is synchronized.
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
    """Copies the allocator's counters into the record. `read` gives them, or nothing while CUDA is not in use."""

    def __init__(self, timeline: Timeline, read: Read) -> None:
        self._timeline = timeline
        self._read = read

    def poll(self) -> None:
        """Copy the counters; the peak only if it is higher, as the script may reset torch's."""
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


def read_current_device() -> Mapping[str, Any]:
    """The counters of the device that the training thread uses; empty, and nothing is initialized, without one."""
    return torch.cuda.memory_stats_as_nested_dict()


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Poll it. Nothing to take back but that: the allocator is only asked."""
    poll: Any = guard(AllocatorReader(timeline, read_current_device).poll)
    timeline.steps.polls.append(poll)
    return [lambda: timeline.steps.polls.remove(poll)]
