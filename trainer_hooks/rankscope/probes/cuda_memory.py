"""CUDA's caching allocator: allocated and reserved memory, the memory that it may use, and how often it ran out.

Read at a step's end, at most once a second, once CUDA is in use, and when a lack of memory ends the process. torch
copies the counters under its lock (`DeviceCachingAllocator::getStats` in c10/cuda/CUDACachingAllocator.cpp), without a
driver call or a synchronization. The backend cudaMallocAsync asks the driver, so it is not read at the end.
"""

from __future__ import annotations

import os
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
CAPACITY = INDEX["device_capacity_bytes"]
CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

Read = Callable[[], Mapping[str, Any]]


class AllocatorReader:
    """Copies the allocator's counters into the record. `read` returns them; empty while CUDA is not in use.

    `read_capacity` returns the bytes that this process may allocate.
    """

    def __init__(self, timeline: Timeline, read: Read, read_capacity: Callable[[], float] = float) -> None:
        self._timeline = timeline
        self._read = read
        self._read_capacity = read_capacity

    def poll(self) -> None:
        """Copy the counters and, once, the capacity."""
        self.copy()
        slots = self._timeline.writer.slots
        if slots[RESERVED] and not slots[CAPACITY]:
            slots[CAPACITY] = self._read_capacity()

    def copy_at_end(self) -> None:
        """Copy the counters if that does not call the driver."""
        if not any("cudaMallocAsync" in os.environ.get(name, "") for name in CONFIGURATIONS):
            self.copy()

    def copy(self) -> None:
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


def read_capacity(index: int | None) -> float:
    """Return the memory of a device, or of the MIG instance, by default the current one; less if the script limits it.

    torch has the device's properties from its start. It reads the limit since 2.7.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).total_memory
    read_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(total * (read_fraction(index) if read_fraction else 1.0))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Add the reader to the polls of a step, and to the end of the process."""
    job = timeline.job
    reader = AllocatorReader(timeline, lambda: read_device(job.device), lambda: read_capacity(job.device))
    job.read_allocator = guard(reader.copy_at_end)

    def forget() -> None:
        job.read_allocator = lambda: None

    return [timeline.steps.add_poll(guard(reader.poll)), forget]
