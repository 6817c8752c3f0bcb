"""Metrics next to the steps: checkpoints, garbage collection, copies, loader workers, mixed precision, CUDA memory."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from rankscope.record import layout
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.ranks.metric import RANK, nonzero, rank_metrics
from rankscope_exporter.ranks.rank import Rank

GENERATIONS = tuple(map(str, range(layout.GC_GENERATIONS)))


def _by_generation(field: str) -> Callable[[Rank], Values]:
    return lambda rank: dict(zip(GENERATIONS, rank.snapshot.many(field), strict=True))


def _by_loader_worker_state(rank: Rank) -> Values:
    seconds = rank.snapshot.many("loader_worker_seconds")
    return dict(zip(layout.LOADER_WORKER_STATES, seconds, strict=True)) if any(seconds) else None


def _with_checkpoint(rank: Rank) -> RankSnapshot | None:
    return rank.snapshot if rank.snapshot["checkpoints"] else None


def _with_scaler(rank: Rank) -> RankSnapshot | None:
    return rank.snapshot if rank.snapshot.has_scaler else None


def _with_cuda(rank: Rank) -> RankSnapshot | None:
    return rank.snapshot if rank.snapshot["cuda_reserved_bytes"] else None


CHECKPOINT = rank_metrics(_with_checkpoint)
AMP = rank_metrics(_with_scaler)
CUDA = rank_metrics(_with_cuda)
METRICS = (
    RANK.counter(
        "checkpoints_total",
        "Checkpoints that the rank has written; all saves between two steps count as one.",
        lambda rank: rank.snapshot["checkpoints"],
    ),
    RANK.counter("checkpoint_bytes_total", "Bytes of these checkpoints, if known.", nonzero("checkpoint_bytes")),
    CHECKPOINT.gauge(
        "checkpoint_last_duration_seconds",
        "Time that the last checkpoint blocked the training thread.",
        itemgetter("checkpoint_last_seconds"),
    ),
    RANK.gauge(
        "checkpoint_last_size_bytes",
        "Size of the last checkpoint; absent if unknown.",
        nonzero("checkpoint_last_bytes"),
    ),
    CHECKPOINT.gauge(
        "checkpoint_last_timestamp_seconds",
        "End of the last checkpoint, in unix time.",
        lambda snapshot: snapshot.unix_field("checkpoint_last_unix"),
    ),
    RANK.counter(
        "gc_collections_total",
        "Runs of Python's cyclic garbage collector in any thread, by generation.",
        _by_generation("gc_collections"),
        "generation",
    ),
    RANK.counter(
        "gc_seconds_total",
        "Time of these runs, in which no Python code of the rank runs.",
        _by_generation("gc_seconds"),
        "generation",
    ),
    RANK.counter(
        "host_to_device_copies_total",
        "Copies from the host to the GPU that the training thread waited for.",
        nonzero("copies"),
    ),
    RANK.counter("host_to_device_copy_bytes_total", "Bytes of these copies.", nonzero("copy_bytes")),
    RANK.counter(
        "loader_worker_seconds_total",
        "Time of the DataLoader's worker processes by their own clocks: `working` while they make batches, including "
        "waits for storage, and `idle` while they have none to make. Absent unless they are forked.",
        _by_loader_worker_state,
        "state",
    ),
    AMP.gauge("amp_scale", "Loss scale of the gradient scaler (AMP).", itemgetter("amp_scale")),
    AMP.counter(
        "amp_skipped_steps_total",
        "Optimizer steps that the gradient scaler skipped because a gradient was not finite.",
        itemgetter("amp_skipped_steps"),
    ),
    CUDA.gauge(
        "cuda_memory_allocated_bytes",
        "Memory of live tensors in CUDA's caching allocator.",
        itemgetter("cuda_allocated_bytes"),
    ),
    CUDA.gauge(
        "cuda_memory_reserved_bytes",
        "Memory that the allocator has reserved, used or not.",
        itemgetter("cuda_reserved_bytes"),
    ),
    CUDA.gauge(
        "cuda_memory_peak_allocated_bytes",
        "Peak memory of live tensors.",
        itemgetter("cuda_peak_allocated_bytes"),
    ),
    RANK.gauge(
        "cuda_memory_capacity_bytes",
        "Memory of the rank's GPU or MIG instance, or the part of it that the script allows torch to use.",
        nonzero("device_capacity_bytes"),
    ),
    CUDA.counter(
        "cuda_allocation_retries_total",
        "Allocations that succeeded only after the allocator had freed its cache: memory is nearly full.",
        itemgetter("cuda_allocation_retries"),
    ),
    CUDA.counter("cuda_out_of_memory_total", "Allocations that failed.", itemgetter("cuda_out_of_memory")),
)
