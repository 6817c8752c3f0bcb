"""Conversion of a rank's record, process and GPU to a reading of the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.record import layout
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import NUMBER
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    CollectiveCounters,
    Counters,
    DeviceMemory,
    Ending,
    GpuCounters,
    LoggedValues,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.collectors.rank_processes import RankProcess
from rankscope_exporter.ranks.parallelism import coordinates, in_steps, stage
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.step_alignment import Alignment


def reading(
    rank: Rank,
    aligned: AlignedCounters | None,
    process: RankProcess | None,
    gpu: RankGpu | None,
    uuids: Mapping[int, str] | None = None,
) -> RankReading:
    """Return the reading of a rank now. Times are seconds of CLOCK_MONOTONIC.

    `uuids` are the GPUs of the run's ranks, by the pids of their processes.
    """
    snapshot = rank.snapshot
    counters = _counters(snapshot, aligned, process, gpu.counters if gpu else GpuCounters())
    return RankReading(
        rank=int(rank.key[1]),
        at=snapshot.read_monotonic,
        began=snapshot["started_monotonic"],
        group=snapshot.info["group"],
        stage=stage(snapshot),
        parallelism=in_steps(snapshot),
        coordinates=coordinates(snapshot),
        node=snapshot.info["node"],
        uuid=rank.uuid,
        world_size=world_size(snapshot.info["world_size"]),
        ended=_ending(rank),
        last_progress=snapshot.last_progress,
        phase=snapshot.phase,
        phase_since=snapshot.phase_since,
        issued=snapshot.issued,
        collective=snapshot.open_group,
        operation=snapshot.open_operation,
        amp_scale=snapshot["amp_scale"] if snapshot.has_scaler else None,
        checkpoints=snapshot["checkpoints"],
        last_checkpoint=_last_checkpoint(snapshot),
        is_stopped=bool(process and process.is_stopped),
        children=process.usage.children if process and process.usage else None,
        gpu=gpu.without(uuids or {}, rank.uuid) if gpu else None,
        memory=_memory(snapshot),
        loss=_logged(snapshot, "loss"),
        gradient_norm=_logged(snapshot, "gradient_norm"),
        counters=counters,
        has_left=snapshot["ended"] == layout.LEFT_GROUP,
    )


def world_size(text: str) -> int:
    """Return the world size; 0 if unknown, without a launcher or in a forged record."""
    return int(text) if NUMBER.fullmatch(text) else 0


def _ending(rank: Rank) -> Ending | None:
    if rank.snapshot.alive:
        return None
    at = _monotonic(rank.snapshot, rank.exit_unix or 0.0)
    snapshot = rank.snapshot
    reason, ended = snapshot.exit_reason or "", snapshot.last_progress if at is None else at
    if reason != "exception":
        return Ending(reason, ended)
    requested = snapshot["exhausted_request_bytes"] or None
    exhausted, phase = snapshot.exhausted_memory, snapshot.exhausted_in_phase
    return Ending(reason, ended, exhausted, phase, requested, has_lost_peer=bool(snapshot["lost_peer"]))


def _memory(snapshot: RankSnapshot) -> DeviceMemory | None:
    if not snapshot["cuda_reserved_bytes"]:
        return None
    return DeviceMemory(
        allocated=snapshot["cuda_allocated_bytes"],
        reserved=snapshot["cuda_reserved_bytes"],
        peak=snapshot["cuda_peak_allocated_bytes"],
        capacity=snapshot["device_capacity_bytes"] or None,
        retries=snapshot["cuda_allocation_retries"],
        failures=snapshot["cuda_out_of_memory"],
    )


def _logged(snapshot: RankSnapshot, quantity: str) -> LoggedValues | None:
    at = layout.LOGGED.index(quantity)
    fields = ("logged_values", "not_finite_values", "not_finite_since_step")
    values, not_finite, since = (snapshot.many(field)[at] for field in fields)
    return LoggedValues(values, not_finite, since) if values else None


def _last_checkpoint(snapshot: RankSnapshot) -> float | None:
    return _monotonic(snapshot, snapshot.unix_field("checkpoint_last_unix")) if snapshot["checkpoints"] else None


def _monotonic(snapshot: RankSnapshot, unix: float) -> float | None:
    """Return a unix time on the node's monotonic clock; None if it is 0 or the record is from another boot."""
    return unix - snapshot.unix_offset if unix and snapshot.unix_offset is not None else None


def _counters(
    snapshot: RankSnapshot, aligned: AlignedCounters | None, process: RankProcess | None, gpu: GpuCounters
) -> Counters:
    working, idle = snapshot.many("loader_worker_seconds")
    has_workers = bool(working or idle)
    return Counters(
        steps=snapshot["steps"],
        phases=snapshot.phase_seconds,
        device_steps=snapshot["device_steps"],
        device_phases=snapshot.device_seconds,
        device_dry=snapshot.device_dry_seconds,
        device_waits=snapshot["device_waits"],
        micro_steps=snapshot["micro_steps"],
        step_buckets=snapshot.many("step_buckets"),
        aligned=aligned or AlignedCounters(),
        collectives=CollectiveCounters(
            snapshot.by_operation("collectives"),
            snapshot.by_operation("collective_bytes"),
            snapshot.by_operation("collective_seconds"),
            snapshot.group_waits,
            snapshot.device_group_waits,
        ),
        gc_seconds=sum(snapshot.many("gc_seconds")),
        amp_skipped_steps=snapshot["amp_skipped_steps"],
        samples=snapshot["samples"] or None,
        tokens=snapshot["tokens"] or None,
        copied_bytes=snapshot["copy_bytes"] or None,
        loader_working=working if has_workers else None,
        loader_idle=idle if has_workers else None,
        process=_process(process),
        gpu=gpu,
    )


def aligned_counters(alignment: Alignment) -> AlignedCounters:
    """Return the counters of the alignment's unplanned steps now."""
    totals = alignment.unplanned
    seconds = dict(zip(layout.PHASES, alignment.phases, strict=True))
    return AlignedCounters(totals.steps, totals.seconds, totals.floor, totals.skew, dict(totals.blame), seconds)


def _process(process: RankProcess | None) -> ProcessCounters:
    if process is None or process.usage is None:
        return ProcessCounters()
    usage, are_children_read = process.usage, not process.usage.unread_children
    return ProcessCounters(
        cpu=process.cpu.get("training"),
        run_queue=usage.run_queue,
        workers_cpu=process.cpu.get("workers") if are_children_read else None,
        workers_run_queue=process.workers_run_queue if are_children_read else None,
        read_bytes=process.read_bytes if are_children_read else None,
    )
