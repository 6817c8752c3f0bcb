"""The hook in every training script of testing/ways: results are bit-identical, and the record is correct."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from testing.ways import WAYS
from testing.ways.launch import launch
from testing.ways.run import BATCH_SIZE, FETCH_SECONDS

STEPS = 8
Line = dict[str, Any]

# Backward passes per step, if not one: accumulation, a GAN's two models, closures, a pipeline's micro-batches.
BACKWARDS = {
    "alone.accumulation": 2,
    "alone.closure": 3,
    "replicas.no_sync": 2,
    "replicas.sync_flag": 2,
    "replicas.gan": 2,
    "sharded.fsdp2_accumulating": 2,
    "split.gpipe": 4,
    "split.one_forward_one_backward": 4,
    "frameworks.accelerate": 2,
    "frameworks.hugging_face": 2,
}
SKIPPED = {"alone.grad_scaler": 2}  # optimizer steps that the scaler skips
BATCHES = {"frameworks.lightning": 1, "frameworks.hugging_face": 2}  # per step, if the script cannot count them
# Ranks that share their batches with another rank, which counts the samples.
SHARED_BATCHES = {"split.tensor_parallel": {1}, "sharded.tensor_parallel_and_fsdp2": {1, 3}}
NO_LOADER = {"alone.own_batching", "alone.random_inputs"}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Line]]:
    """Return the output of each rank for each script of a group, which is trained once."""

    @functools.cache
    def trained(group: str) -> list[Line]:
        ranks, ways = WAYS[group]
        lines = launch(ranks, STEPS, ways, tmp_path_factory.mktemp("run"))
        assert sorted((line["way"], line["rank"]) for line in lines) == sorted(product(ways, range(ranks)))
        return lines

    return trained


@pytest.fixture(scope="module", params=list(WAYS))
def lines(request: pytest.FixtureRequest, group: Callable[[str], list[Line]]) -> list[Line]:
    return group(request.param)


@pytest.fixture(scope="module")
def frameworks(group: Callable[[str], list[Line]]) -> list[Line]:
    return group("frameworks")


def failures(lines: list[Line], is_right: Any) -> list[str]:
    """Return the scripts and ranks whose lines are failures, with the lines."""
    return [f"{line['way']} on rank {line['rank']}: {json.dumps(line)}" for line in lines if not is_right(line)]


def test_results_are_bit_identical_with_and_without_the_hook(lines: list[Line]) -> None:
    assert failures(lines, lambda line: line["identical"] and line["tensors"]) == []


def test_no_probe_failed_and_nothing_was_logged(lines: list[Line]) -> None:
    assert failures(lines, lambda line: line["messages"] == line["probes_disabled"] == []) == []


def test_uninstrument_restores_all_patched_objects(lines: list[Line]) -> None:
    assert failures(lines, lambda line: line["patched"] and line["not_restored"] == line["left_behind"] == []) == []


def test_the_phases_of_each_rank_sum_to_its_wall_time(lines: list[Line]) -> None:
    """Compare with the script's clock, read before and after `instrument()`, and before and after the end."""

    def is_right(line: Line) -> bool:
        at_least, at_most = line["elapsed"]
        return bool(at_least <= sum(line["record"]["phases"].values()) <= at_most)

    assert failures(lines, is_right) == []


def test_steps_are_those_of_the_script(lines: list[Line]) -> None:
    assert failures(lines, lambda line: line["record"]["steps"] == line["script"]["steps"]) == []


def test_a_phase_is_no_longer_than_the_scripts_clock_around_it(lines: list[Line]) -> None:
    def is_right(line: Line) -> bool:
        published, clocks = line["record"]["phases"], line["script"]["phases"]
        return all(published.get(phase, 0.0) <= seconds for phase, seconds in clocks.items())

    assert failures(lines, is_right) == []


def test_data_wait_is_no_shorter_than_the_datasets_delay(lines: list[Line]) -> None:
    fetch_ahead = {"alone.persistent_workers", "frameworks.accelerate"}

    def is_right(line: Line) -> bool:
        at_least = line["script"]["fetches"] * FETCH_SECONDS
        return line["way"] in fetch_ahead or bool(line["record"]["phases"].get("data_wait", 0.0) >= at_least)

    assert failures(lines, is_right) == []


def test_evaluations_and_checkpoints_of_frameworks_are_recorded(frameworks: list[Line]) -> None:
    expected = {
        "frameworks.accelerate": {"checkpoint"},
        "frameworks.lightning": {"checkpoint", "evaluation"},
        "frameworks.hugging_face": {"checkpoint", "evaluation"},
    }
    assert failures(frameworks, lambda line: expected[line["way"]] <= line["record"]["phases"].keys()) == []


def test_micro_steps_are_the_backward_passes(lines: list[Line]) -> None:
    def is_right(line: Line) -> bool:
        steps, way = line["script"]["steps"] + SKIPPED.get(line["way"], 0), line["way"]
        return bool(line["record"]["micro_steps"] == steps * BACKWARDS.get(way, 1))

    assert failures(lines, is_right) == []


def test_skipped_steps_are_counted_and_are_not_steps(lines: list[Line]) -> None:
    assert failures(lines, lambda line: line["record"]["amp_skipped_steps"] == SKIPPED.get(line["way"], 0)) == []


def test_samples_are_those_of_the_training(lines: list[Line]) -> None:
    def is_right(line: Line) -> bool:
        batches = line["script"]["batches"] or line["script"]["steps"] * BATCHES.get(line["way"], 0)
        if line["rank"] in SHARED_BATCHES.get(line["way"], ()):
            batches = 0
        return bool(line["record"]["samples"] == batches * BATCH_SIZE)

    assert failures(lines, is_right) == []


def test_forward_and_backward_are_recorded_in_every_script(lines: list[Line]) -> None:
    """Check also data wait with a loader, checkpoint with a save, and collectives between ranks."""

    def is_right(line: Line) -> bool:
        expected = {"forward", "backward", *line["script"]["phases"]}
        if line["way"] not in NO_LOADER:
            expected.add("data_wait")
        if line["world_size"] > 1:
            expected.add("collective_wait")
        return expected <= line["record"]["phases"].keys()

    assert failures(lines, is_right) == []


def test_every_step_of_several_ranks_has_its_collectives(lines: list[Line]) -> None:
    def is_right(line: Line) -> bool:
        return line["world_size"] == 1 or bool(line["record"]["collectives"] >= line["script"]["steps"])

    assert failures(lines, is_right) == []
