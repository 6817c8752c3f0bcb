"""Faults of GPUs, of their allocations, and of the node's exporter. All run over gloo only."""

from __future__ import annotations

from functools import partial

from testing.job.launch import RANKS
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import (
    GPUS_ALONE,
    Case,
    Inject,
    Target,
    alert,
    drawn_gpu,
    drawn_rank,
    drawn_rank_and_gpu,
    drawn_spare_gpu,
)

NodeCase = partial(Case, has_doses=False, devices=GPUS_ALONE)


def half_idle(memory: float) -> Inject:
    """Make all GPUs of ranks half idle, with `memory` (a ratio) of each used."""

    def inject(arena: Arena, _target: Target) -> None:
        for rank in range(RANKS):
            arena.change_gpu(rank, ranks_busy=0.4, ranks_memory=memory)

    return inject


def finish_but_hold_memory(arena: Arena, target: Target) -> None:
    arena.job.finish()
    arena.hold_memory(target.rank, "20 GiB")


FAULTS = {
    # GPUs are half idle and mostly empty, and no wait explains it.
    "f05_batch_too_small": NodeCase(
        "batch too small",
        half_idle(memory=0.3),
        alert("RankscopeLowUtilization", "batch_too_small"),
        simulated="utilization and memory",
    ),
    # GPUs are half idle and full; steps advance.
    "f06_memory_bound": NodeCase(
        "memory-bound",
        half_idle(memory=0.9),
        alert("RankscopeLowUtilization", "memory_bound"),
        simulated="utilization and memory",
    ),
    # A process that is no rank holds memory of an idle GPU.
    "f07_memory_held": NodeCase(
        "memory held, GPU idle",
        lambda arena, target: arena.hold_memory(target.spare_gpu, "20 GiB"),
        alert("RankscopeGpuMemoryHeldIdle"),
        drawn_spare_gpu,
        simulated="the memory; its process is real",
    ),
    # A rank makes its steps, but its GPU is empty.
    "f20_cpu_fallback": NodeCase(
        "CPU fallback",
        lambda arena, target: arena.change_gpu(target.rank, ranks_busy=0, ranks_memory=0),
        alert("RankscopeCpuFallback", "cpu_fallback"),
        drawn_rank,
        simulated="the empty GPU",
    ),
    # The job has ended, but a leftover process still holds memory of its GPU.
    "f20_finished_but_held": NodeCase(
        "finished but held",
        finish_but_hold_memory,
        alert("RankscopeGpuMemoryHeldIdle"),
        drawn_gpu,
        simulated="the memory; its process is real",
    ),
    # A rank has its model on its GPU and makes its steps, but runs no kernel there.
    "f20_idle_gpu": NodeCase(
        "allocated, idle",
        lambda arena, target: arena.change_gpu(target.rank, ranks_busy=0),
        alert("RankscopeGpuAllocatedIdle"),
        drawn_rank_and_gpu,
        simulated="the idle GPU",
        notified_within=100.0,  # an exporter calls a GPU idle after a minute, also at this speed
    ),
    # A scheduler has allocated a GPU to a user who runs nothing on it.
    "f20_never_used": NodeCase(
        "allocated, never used",
        lambda arena, target: arena.claim(target.spare_gpu),
        alert("RankscopeGpuUnused"),
        drawn_spare_gpu,
        simulated="the scheduler's file",
    ),
    # A GPU reports a hardware error.
    "g1_xid": NodeCase(
        "XID",
        lambda arena, target: arena.change_gpu(target.rank, xid=48),
        alert("RankscopeGpuXid"),
        drawn_gpu,
        simulated="the event",
    ),
    # A GPU that no rank uses no longer answers.
    "g2_lost_gpu": NodeCase(
        "a lost GPU",
        lambda arena, target: arena.change_gpu(target.spare_gpu, lost=True),
        alert("RankscopeGpuLost"),
        drawn_spare_gpu,
        simulated="all of it",
    ),
    # The exporter of the node is down; the ranks go on training.
    "g3_exporter_down": NodeCase(
        "no exporter",
        lambda arena, _: arena.stop_exporter(),
        alert("RankscopeExporterDown"),
    ),
    # A job with a newer version of the hook has a record that the exporter cannot read.
    "g4_ranks_hidden": NodeCase(
        "a record of another version",
        lambda arena, _: arena.publish_other_version(),
        alert("RankscopeRanksHidden"),
        simulated="the record, which has only a header",
    ),
}
