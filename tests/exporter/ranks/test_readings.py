"""Readings of the diagnosis from a rank's record, process and GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from testing.records import READ_AT, rank_snapshot
from testing.simulated_job import Job, lagging, scan

from rankscope.record import layout
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    DeviceMemory,
    Ending,
    GpuCounters,
    GpuReading,
    LoggedValues,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.exposition.sample_cache import SampleCache
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.collectors.rank_processes import METRICS, RankProcess
from rankscope_exporter.ranks.process_usage import Usage
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.readings import aligned_counters, reading
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import StepAlignment

OFFSET = 1_800_000_000.0  # of unix time to the monotonic clock
USAGE = Usage(9.0, 7.0, 2.0, {11: 1.5}, 4096.0, 1, 0.0)


def rank(slots: dict[str, float] | None = None, exit_unix: float | None = None, **labels: Any) -> Rank:
    slots = {"started_unix": OFFSET + (slots or {}).get("started_monotonic", 0.0), **(slots or {})}
    snapshot = rank_snapshot(slots, alive=exit_unix is None, **{"rank": "3", "world_size": "8", **labels})
    return Rank(replace(snapshot, unix_offset=OFFSET), exit_unix, 1000)


def read(slots: dict[str, float] | None = None, exit_unix: float | None = None, **labels: Any) -> RankReading:
    """Return the reading of a record without process and GPU."""
    return reading(rank(slots, exit_unix, **labels), None, None, None)


def test_a_run_on_one_machine_is_read_completely(run_dir) -> None:
    Job(run_dir, ranks=2, group="0-1", world_size="2", node="node-a", uuid="GPU-7").run(
        20, lagging("data_wait", laggard=1)
    )
    ranks = scan(RunDirectory([run_dir])).ranks
    aligned = {one.key: aligned_counters(one) for one in StepAlignment().take(ranks)}
    first, second = sorted((reading(one, aligned[one.key], None, None) for one in ranks), key=lambda one: one.rank)
    assert (first.rank, second.rank) == (0, 1)
    assert (second.group, second.node, second.uuid, second.world_size) == ("0-1", "node-a", "GPU-7", 2)
    assert first.counters.steps == second.counters.steps == 20
    assert first.counters.phases["collective_wait"] > 5 * second.counters.phases["collective_wait"] > 0.0
    steps = second.counters.aligned
    assert sum(steps.phases.values()) == pytest.approx(steps.seconds)
    assert steps.blame["data_wait"] == pytest.approx(first.counters.aligned.skew)
    assert first.counters.aligned.wait_floor == pytest.approx(steps.wait_floor)


def test_the_phases_of_a_living_rank_sum_to_its_age() -> None:
    slots = {"started_monotonic": READ_AT - 100.0, "phase_seconds": 60.0, "phase": float(layout.BACKWARD)}
    found = read(slots)
    assert found.ended is None
    assert (found.at, found.began, found.last_progress) == (READ_AT, READ_AT - 100.0, READ_AT - 40.0)
    assert (found.phase, found.phase_since) == ("backward", READ_AT - 40.0)
    assert sum(found.counters.phases.values()) == 100.0


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("", 0), ("many", 0), ("-1", 0), ("9" * 40, 0), ("²", 0)])
def test_a_world_size_that_is_not_a_number_is_unknown(text, size) -> None:
    """Ranks without a launcher have none, and forged records may have any text."""
    assert read(world_size=text, rank="0").world_size == size


@pytest.mark.parametrize(
    ("ended", "reason"),
    [(layout.FINISHED, "finished"), (layout.EXCEPTION, "exception"), (layout.RUNNING, "killed")],
)
def test_the_end_of_a_rank_is_on_the_monotonic_clock(ended, reason) -> None:
    assert read({"ended": ended}, exit_unix=OFFSET + 9000.0).ended == Ending(reason, 9000.0)


def test_the_end_has_what_the_exception_says_about_memory() -> None:
    slots = {"exhausted_memory": 1.0, "exhausted_in_phase": 1.0 + layout.BACKWARD, "exhausted_request_bytes": 64.0}
    found = read({"ended": layout.EXCEPTION, **slots}, exit_unix=OFFSET + 9000.0).ended
    assert found == Ending("exception", 9000.0, "device", "backward", 64.0)
    assert read({"ended": layout.FINISHED, **slots}, exit_unix=OFFSET + 9000.0).ended == Ending("finished", 9000.0)


def test_the_end_has_that_a_peer_was_lost_or_that_the_rank_had_left_its_group() -> None:
    lost = read({"ended": layout.EXCEPTION, "lost_peer": 1.0}, exit_unix=OFFSET + 9000.0)
    assert (lost.ended, lost.has_left) == (Ending("exception", 9000.0, has_lost_peer=True), False)
    assert read({"ended": layout.LEFT_GROUP}).has_left


def test_the_memory_of_a_rank_is_absent_without_cuda_and_its_capacity_if_it_is_unknown() -> None:
    slots = {"cuda_allocated_bytes": 1.0, "cuda_reserved_bytes": 2.0, "cuda_peak_allocated_bytes": 3.0}
    assert read(slots).memory == DeviceMemory(1.0, 2.0, 3.0)
    full = {**slots, "device_capacity_bytes": 4.0, "cuda_allocation_retries": 5.0, "cuda_out_of_memory": 6.0}
    assert read(full).memory == DeviceMemory(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert read().memory is None


def test_logged_values_are_read_as_far_as_the_script_logs_them() -> None:
    found = read({"logged_values": 9.0, "not_finite_values": 3.0, "not_finite_since_step": 7.0})
    assert (found.loss, found.gradient_norm) == (LoggedValues(9.0, 3.0, 7.0), None)


def test_an_end_before_the_last_boot_is_the_last_progress() -> None:
    one = rank({"started_monotonic": 500.0}, exit_unix=OFFSET + 9000.0)
    found = reading(replace(one, snapshot=replace(one.snapshot, unix_offset=None)), None, None, None)
    assert found.ended == Ending("killed", 500.0)


def test_a_checkpoint_is_on_the_monotonic_clock_and_absent_if_there_was_none() -> None:
    slots = {"checkpoints": 2.0, "checkpoint_last_unix": OFFSET + 9000.0}
    assert (read(slots).checkpoints, read(slots).last_checkpoint) == (2.0, 9000.0)
    assert read().last_checkpoint is None


def test_setting_the_clock_neither_creates_nor_moves_a_checkpoint() -> None:
    slow = {"started_unix": OFFSET - 3600.0}
    slots = {"checkpoints": 2.0, "checkpoint_last_unix": OFFSET - 3600.0 + 9000.0}
    assert read(slow).last_checkpoint is None
    assert read(slow | slots).last_checkpoint == 9000.0


def test_collectives_are_counted_by_group() -> None:
    assert read({"group_collectives": 7.0}, groups=["0-7"]).issued == {"0-7": 7.0}
    assert read().issued == {}


def test_the_collective_that_a_rank_is_in_has_an_operation_and_a_group() -> None:
    inside = {"collective_op": 1.0 + layout.OPS.index("ddp_all_reduce"), "collective_group": 0.0}
    one = read(inside, groups=["0-7"])
    assert (one.operation, one.collective) == ("ddp_all_reduce", "0-7")
    assert read(groups=["0-7"]).operation == ""


def test_operations_that_a_rank_does_not_use_are_absent() -> None:
    found = read({"collectives": 3.0, "collective_bytes": 12.0, "collective_seconds": 0.5}).counters.collectives
    assert (found.calls, found.bytes, found.seconds) == ({"all_reduce": 3.0}, {"all_reduce": 12.0}, {"all_reduce": 0.5})


def test_missing_features_of_a_rank_are_unknown() -> None:
    found = read()
    assert (found.amp_scale, found.gpu, found.children) == (None, None, None)
    assert (found.counters.loader_working, found.counters.loader_idle) == (None, None)
    assert (found.counters.process, found.counters.gpu) == (ProcessCounters(), GpuCounters())
    assert found.counters.aligned == AlignedCounters()
    assert (found.counters.device_phases, found.counters.device_dry) == ({}, {})


def test_samples_tokens_and_copies_are_known_if_any_are_counted() -> None:
    found = read({"samples": 8.0, "tokens": 4096.0, "copy_bytes": 32768.0}).counters
    assert (found.samples, found.tokens, found.copied_bytes) == (8.0, 4096.0, 32768.0)
    found = read().counters
    assert (found.samples, found.tokens, found.copied_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("parallelism", "groups", "expected"),
    [
        ("ddp", {}, ()),
        ("", {}, ()),
        ("fsdp", {}, ("fsdp",)),
        ("fsdp2+tp", {}, ("tp", "fsdp")),
        ("ddp", {"2-3": "mesh_tp", "1+3": "mesh_dp"}, ("tp",)),
        ("ddp", {"2-3": "mesh_pp"}, ()),
        ("", {"2-3": "EXPERT_MODEL_PARALLEL_GROUP"}, ("ep",)),
    ],
)
def test_parallelism_that_needs_collectives_within_a_step_is_read(parallelism, groups, expected) -> None:
    labels = {"groups": [*groups], "group_descriptions": [*groups.values()]}
    assert read(settings={"parallelism": parallelism}, **labels).parallelism == expected


def test_a_scale_that_has_collapsed_to_0_is_known() -> None:
    assert read({"amp_skipped_steps": 9.0}).amp_scale == 0.0
    assert read({"amp_scale": 65536.0}).amp_scale == 65536.0


def test_the_process_and_the_gpu_are_read_with_the_record() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "3", "1000")))
    process.update(USAGE)
    gpu = RankGpu(GpuReading("5", 0.4), GpuCounters(30.0))
    found = reading(rank(), None, process, gpu)
    assert (found.children, found.gpu, found.counters.gpu) == (1, gpu.reading, gpu.counters)
    assert found.counters.process == ProcessCounters(9.0, 2.0, 7.0, 1.5, 4096.0)


def test_contexts_of_the_runs_other_ranks_are_not_counted_on_a_gpu() -> None:
    """Pids 11 and 12 are ranks; 13 shares their GPU, and 14 is no rank."""
    gpu = RankGpu(GpuReading("0", processes=4), GpuCounters(), pids=(11, 12, 13, 14))
    own = rank().uuid
    processes = [
        found.processes
        for uuids in ({}, {11: own, 12: own}, {11: own, 12: "GPU-b", 13: "GPU-c"}, {0: "GPU-b", 11: "GPU-b"})
        if (found := reading(rank(), None, None, gpu, uuids).gpu)
    ]
    assert processes == [4, 4, 2, 3]


def test_values_that_include_children_are_unknown_while_there_are_too_many() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "3", "1000")))
    process.update(USAGE)
    process.update(replace(USAGE, unread_children=500))
    assert reading(rank(), None, process, None).counters.process == ProcessCounters(9.0, 2.0)
