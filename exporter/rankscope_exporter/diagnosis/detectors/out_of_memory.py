"""Ranks that run out of memory on their GPU, while they still train. At their end it is a cause of the crash.

A job that fills its GPU is healthy. So is one in which the allocator frees its cache a few times, as in the first long
batch, or in which allocations fail while it looks for a batch size. A rank runs out of memory if

- its allocator had to free its cache for at least `memory_retries` allocations in the last ten minutes, in at least
  three of them. Each retry waits for the GPU.
- at least three allocations failed in that time, in three of the minutes, and the script went on after each.
- its memory has grown in nearly every one of the last twenty minutes, the peak as well, in the second half about as
  much as in the first, and at this rate it is full in less than `memory_full` seconds (cause `growing`).

The cause is the first one of these, of the second and third the larger one:

- `growing`: as above
- `foreign_process`: processes that are no ranks of the run hold at least `memory_share` of the GPU's memory, and the
  rank may use all of it: it has no MIG instance, and `set_per_process_memory_fraction` does not limit it
- `fragmentation`: the allocator has reserved at least `memory_share` beyond the most that was ever allocated
- `too_little_capacity`: the ranks of the run on this GPU have allocated more than `memory_bound` of it at the peak
- `unknown`: none of these, or the capacity is unknown

The counters are those of torch's caching allocator (`num_alloc_retries`, `num_ooms`). The backend cudaMallocAsync does
not count them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.memory import MemoryTrend
from rankscope_exporter.diagnosis.readings import DeviceMemory, RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "out_of_memory"
GROWING, FOREIGN, FRAGMENTATION = "growing", "foreign_process", "fragmentation"
TOO_LITTLE, UNKNOWN = "too_little_capacity", "unknown"
MINUTES, FAILURES = 3, 3.0
"""The fewest minutes with a retry or a failure, and the fewest failures."""
WHOLE = 0.9
"""Ratio of the GPU's memory from which a rank may use all of it. CUDA and NVML differ by about one percent."""


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the ranks that run out of memory, as one candidate with the evidence of the worst one."""
    found = [
        (one.now, trend)
        for one in window.run.ranks
        if (trend := past.memory.get(one.rank)) and one.now.memory and _runs_out(trend, window.thresholds)
    ]
    if not found:
        return
    worst, trend = max(found, key=lambda one: (one[1].failures, one[1].retries, -(one[1].full_in or 0.0)))
    ranks = tuple(one.rank for one, _ in found)
    where = place(worst) if len(ranks) == 1 else Place(group=worst.group, ranks=ranks)
    yield Candidate(KIND, 0.0, *_explained(window, worst, trend, where), lasted=0.0)


def _runs_out(trend: MemoryTrend, thresholds: Thresholds) -> bool:
    has_retries = trend.retries >= thresholds.memory_retries and trend.retry_minutes >= MINUTES
    has_failures = trend.failures >= FAILURES and trend.failure_minutes >= MINUTES
    return has_retries or has_failures or _is_growing(trend, thresholds)


def _is_growing(trend: MemoryTrend, thresholds: Thresholds) -> bool:
    return trend.full_in is not None and trend.full_in <= thresholds.memory_full


def _explained(
    window: Window, worst: RankReading, trend: MemoryTrend, where: Place
) -> tuple[str, Place, dict[str, float]]:
    """Return the cause, the place, and the evidence of the worst rank."""
    memory, thresholds = worst.memory, window.thresholds
    assert memory
    if _is_growing(trend, thresholds) and trend.full_in is not None:
        return GROWING, where, {"full_in": trend.full_in, **peak_of(memory)}
    on_gpu = [one.now.memory for one in window.run.ranks if one.now.uuid == worst.uuid and one.now.memory]
    cause, evidence = reason(worst, memory, sum(one.peak for one in on_gpu), thresholds)
    events = {"failures": trend.failures} if trend.failures >= FAILURES else {"retries": trend.retries}
    return cause, where, {**events, **evidence}


def peak_of(memory: DeviceMemory) -> dict[str, float]:
    """Return the most that was allocated, and the capacity if it is known, as evidence."""
    return {"peak": memory.peak} | ({"capacity": memory.capacity} if memory.capacity else {})


def reason(
    rank: RankReading, memory: DeviceMemory, peaks: float, thresholds: Thresholds, requested: float | None = None
) -> tuple[str, dict[str, float]]:
    """Return why a rank has too little memory, with the evidence. `peaks` are those of all ranks of the run on its GPU.

    If the size of the allocation that failed is known, it is compared with that, else with `memory_share`.
    """
    evidence = peak_of(memory)
    if memory.capacity is None:
        return UNKNOWN, evidence
    enough = requested or thresholds.memory_share * memory.capacity
    gpu = rank.gpu
    is_whole = gpu is not None and gpu.total_bytes is not None and memory.capacity >= WHOLE * gpu.total_bytes
    foreign = gpu.foreign_bytes if gpu and gpu.foreign_bytes and is_whole else 0.0
    unused = memory.reserved - memory.peak
    if foreign >= enough and foreign >= unused:
        pid = gpu.foreign_pid if gpu else None
        return FOREIGN, {**evidence, "foreign_bytes": foreign} | ({} if pid is None else {"foreign_pid": float(pid)})
    if unused >= enough:
        return FRAGMENTATION, {**evidence, "unused": unused}
    return (TOO_LITTLE if peaks > thresholds.memory_bound * memory.capacity else UNKNOWN), evidence


DETECTORS = (StateDetector(KIND, detect, returns=True, is_one_per_run=True, explained_by=("crash",)),)
