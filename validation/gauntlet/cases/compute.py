"""Faults in the computing of ranks, on the host and on the device."""

from __future__ import annotations

from testing.job.control import Behavior
from testing.job.launch import RANKS
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import (
    HOST_AND_DEVICE,
    Case,
    Target,
    alert,
    all_ranks,
    drawn_rank,
    first_rank,
    lagging,
    one_rank,
    rank_zero,
)

HOGS = 3
AT_ONCE_MS = 10  # a thread that has slept computes this long before it is preempted (measured with Linux 6.18)

slow_device_of_all = all_ranks(lambda target: target.slow_device)
slow_device_of_one = one_rank(lambda target: target.slow_device)


def throttle_one(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, throttle=["sw_thermal_slowdown", "hw_thermal_slowdown"], temperature=91)
    slow_device_of_one(arena, target)


def throttle_all(arena: Arena, target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, throttle=["hw_power_brake_slowdown"])
    slow_device_of_all(arena, target)


def contend_for_cpu(arena: Arena, target: Target) -> None:
    # The rank computes on the CPU for a part of its device's time: as long as before, while the CPU is not shared.
    computed = AT_ONCE_MS + target.extra_ms / HOGS
    forward = min(computed, Behavior.forward)
    slept = {"forward": Behavior.forward - forward, "backward": Behavior.backward - (computed - forward)}
    arena.change_ranks(ranks={target.rank: {**slept, "forward_cpu": computed}})
    arena.crowd(target.rank, HOGS)


def compute_on_the_gpu_of_a_rank(arena: Arena, target: Target) -> None:
    arena.hold_memory(target.rank, "8 GiB")
    arena.change_gpu(target.rank, busy=0.3)
    slow_device_of_one(arena, target)


FAULTS = {
    # Rank 0 does extra work (logging, upload, metrics) after each step, outside the model.
    "f09_rank_zero_works": Case(
        "rank 0 does extra work",
        first_rank(lambda target: {"post": target.extra_ms}),
        lagging("other"),
        rank_zero,
    ),
    # One rank's computation is slow; its GPU's clock is reduced, with a reason.
    "f10_throttling": Case(
        "thermal throttling",
        throttle_one,
        lagging("throttled"),
        drawn_rank,
        simulated="clock, reason and temperature",
    ),
    # All ranks compute slowly; the clocks of all their GPUs are reduced, with a reason.
    "f10_throttling_everywhere": Case(
        "throttling of all",
        throttle_all,
        alert("RankscopeThrottled", "throttled"),
        simulated="clocks and reason",
    ),
    # A rank computes on the host and shares its CPU; the GPU's clocks are normal.
    "f11_cpu_contention": Case(
        "CPU contention",
        contend_for_cpu,
        lagging("cpu_contention"),
        drawn_rank,
    ),
    # Another process computes on a rank's GPU, and the rank is slower.
    "f12_foreign_process": Case(
        "a foreign process on the GPU",
        compute_on_the_gpu_of_a_rank,
        lagging("foreign_process"),
        drawn_rank,
        simulated="the foreign process' work and memory; its process is real",
    ),
    # In each step, another rank has more work.
    "f15_rotating_straggler": Case(
        "uneven work",
        all_ranks(lambda target: {"rotating": target.extra_ms}),
        alert("RankscopeRotatingStraggler", "uneven_work"),
        healthy_seconds=45.0,  # work that is uneven from the start of a run is usual there
    ),
    # Every tenth step a garbage collection delays a random rank: the slowest steps grow, the median does not.
    "f16_gc_spikes": Case(
        "garbage-collection spikes",
        all_ranks(lambda target: {"collect_every": 10, "collect": 10 * target.extra_ms}),
        alert("RankscopeRotatingStraggler", "gc"),
        simulated="a collection's length is slept",
    ),
    # Every gradient is infinite: each step is skipped, and the loss scale halves each time.
    "f24_scale_collapse": Case(
        "AMP scale collapse",
        all_ranks(lambda _: {"overflows": True}),
        alert("RankscopeLossScaleCollapse"),
        has_doses=False,
    ),
    # The host takes twice as long to launch the model's many small kernels as the device takes to run them.
    "f25_launch_bound": Case(
        "launch-bound",
        all_ranks(lambda _: {"issue": 2}),
        alert("RankscopeLaunchBound", "launch"),
        simulated="a launch's cost is slept",
        has_doses=False,
        devices=HOST_AND_DEVICE,
    ),
    # After each batch the host waits for a value and then works: the device is idle meanwhile. In the decoy
    # `rare_reads` the device runs the last step during this work.
    "f26_device_reads": Case(
        "a value read on every batch",
        all_ranks(lambda target: {"read_every": 1, "post": target.extra_ms}),
        alert("RankscopeDeviceReads", "device_read"),
        devices=HOST_AND_DEVICE,
    ),
}
