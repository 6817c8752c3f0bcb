"""The hook in every way to train: results are bit-identical, and the record is right about the training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.trainer_hooks.ways import WAYS
from tests.trainer_hooks.ways.launch import launch
from tests.trainer_hooks.ways.run import FETCH_SECONDS

STEPS = 8
Line = dict[str, Any]


@pytest.fixture(scope="module", params=list(WAYS))
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """What each rank said of each way of one group."""
    ranks, ways = WAYS[request.param]
    lines = launch(ranks, STEPS, ways, tmp_path_factory.mktemp("run"))
    assert sorted((line["way"], line["rank"]) for line in lines) == sorted((w, r) for w in ways for r in range(ranks))
    return lines


def wrong(lines: list[Line], is_right: Any) -> list[str]:
    """Which ways on which rank are not as they should be, with what was seen."""
    return [f"{line['way']} on rank {line['rank']}: {json.dumps(line)}" for line in lines if not is_right(line)]


def test_results_are_bit_identical_with_and_without_the_hook(lines: list[Line]) -> None:
    assert wrong(lines, lambda line: line["identical"] and line["tensors"]) == []


def test_no_probe_failed_and_nothing_was_logged(lines: list[Line]) -> None:
    assert wrong(lines, lambda line: line["messages"] == line["probes_disabled"] == []) == []


def test_uninstrument_restores_whatever_was_patched(lines: list[Line]) -> None:
    assert wrong(lines, lambda line: line["patched"] and line["not_restored"] == line["left_behind"] == []) == []


def test_the_phases_of_each_rank_sum_to_its_wall_time(lines: list[Line]) -> None:
    """By the script's own clock: read before and after `instrument()`, and before and after the end."""

    def is_right(line: Line) -> bool:
        at_least, at_most = line["elapsed"]
        return bool(at_least <= sum(line["record"]["phases"].values()) <= at_most)

    assert wrong(lines, is_right) == []


def test_steps_are_those_that_the_script_made(lines: list[Line]) -> None:
    assert wrong(lines, lambda line: line["record"]["steps"] == line["script"]["steps"]) == []


def test_data_wait_lies_between_the_datasets_delay_and_what_the_script_waited(lines: list[Line]) -> None:
    """The script's clock is around the loader's; a loader that fetches when it is asked is no quicker than its data."""
    fetch_ahead = {"alone.persistent_workers", "frameworks.accelerate"}

    def is_right(line: Line) -> bool:
        if not line["script"]["fetches"]:
            return True
        at_least = 0.0 if line["way"] in fetch_ahead else line["script"]["fetches"] * FETCH_SECONDS
        waited = line["record"]["phases"]["data_wait"]
        return bool(at_least <= waited <= line["script"]["data_seconds"])

    assert wrong(lines, is_right) == []
