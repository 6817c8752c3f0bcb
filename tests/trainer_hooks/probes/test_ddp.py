"""DDP under torchrun: results are bit-identical with the hook, and the record is correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testing.torchrun import reports

from rankscope.record.layout import OPS

JOB = Path(__file__).parents[1] / "jobs" / "every_variant.py"
VARIANTS = ("plain", "fp16", "no_sync", "static_graph", "find_unused", "peek", "unused")
STEPS = 12
PARAMETER_BYTES = 4 * (16 * 32 + 32 + 32 + 32 + 32 * 4 + 4)


@pytest.fixture(scope="module", params=[1, 3], ids=lambda size: f"world size {size}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the output of each rank of a job that trained every variant with and without the hook."""
    return reports(request.param, JOB, *VARIANTS, RANKSCOPE_RUN_DIR=str(tmp_path_factory.mktemp("run")))


def calls(result: dict[str, Any], op: str) -> float:
    return float(result["collectives"][OPS.index(op)])


def test_parameters_are_bit_identical_with_and_without_the_hook(ranks: list[dict[str, Any]]) -> None:
    assert {
        (rank["rank"], variant): rank["variants"][variant]["identical"] for rank in ranks for variant in VARIANTS
    } == {(rank["rank"], variant): True for rank in ranks for variant in VARIANTS}


def test_each_optimizer_step_is_one_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        steps = {variant: rank["variants"][variant]["steps"] for variant in VARIANTS}
        assert steps == {variant: STEPS / 2 if variant == "no_sync" else STEPS for variant in VARIANTS}


def test_each_synchronizing_backward_is_one_all_reduce(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for variant in VARIANTS:
            expected = STEPS / 2 if variant == "no_sync" else STEPS
            assert calls(rank["variants"][variant], "ddp_all_reduce") == expected, variant


def test_the_bytes_of_an_all_reduce_are_the_gradients_and_unknown_under_a_communication_hook(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        index = OPS.index("ddp_all_reduce")
        assert rank["variants"]["plain"]["collective_bytes"][index] == STEPS * PARAMETER_BYTES
        assert rank["variants"]["fp16"]["collective_bytes"][index] == 0


def test_buffer_broadcasts_in_forward_are_counted(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert calls(rank["variants"]["plain"], "ddp_broadcast") == STEPS


def test_ranks_agree_on_their_identity(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    results = [rank["variants"]["plain"] for rank in ranks]
    assert {result["run"] for result in results} == {results[0]["run"]}
    assert {result["group"] for result in results} == {"0" if size == 1 else f"0-{size - 1}"}
    assert {result["world_size"] for result in results} == {str(size)}
