"""The pipeline stage of a rank, and its place in other kinds of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from testing.records import rank_snapshot

from rankscope.record import layout
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ranks.parallelism import coordinates, stage

GROUPS = ["0-7", "0-6:2", "2-3", "2,6"]


def rank(number: int = 2, calls: dict[str, float] | None = None, **info: Any) -> RankSnapshot:
    snapshot = rank_snapshot({}, rank=str(number), group="0-7", **{"groups": GROUPS, **info})
    slots = list(snapshot.slots)
    slots[layout.INDEX["steps"]] = 100.0
    for op, count in (calls or {}).items():
        slots[layout.INDEX["collectives"] + layout.OPS.index(op)] = count
    object.__setattr__(snapshot, "slots", tuple(slots))
    return snapshot


@pytest.mark.parametrize("description", ["mesh_pp", "pp", "PIPELINE_MODEL_PARALLEL_GROUP", "mesh_stages", "pipeline"])
def test_the_stage_is_the_place_in_the_group_with_a_pipeline_description(description) -> None:
    assert stage(rank(group_descriptions=["", description, "mesh_tp", "mesh_dp"])) == 1


@pytest.mark.parametrize("description", ["mesh_dp", "mesh_tp", "TENSOR_MODEL_PARALLEL_GROUP", "mesh_shipping", ""])
def test_other_groups_are_not_a_pipeline(description) -> None:
    assert stage(rank(group_descriptions=["", description, description, description])) is None


def test_combined_groups_of_megatron_are_not_a_pipeline() -> None:
    names = ["MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "EMBEDDING_GROUP"]
    assert coordinates(rank(group_descriptions=["", *names])) == {}
    names = [
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        "EXPERT_DATA_PARALLEL_GROUP",
    ]
    assert coordinates(rank(group_descriptions=["", *names])) == {}


def test_a_part_of_the_run_whose_ranks_send_to_each_other_is_a_pipeline() -> None:
    assert stage(rank(pairwise=["1"])) == 1
    assert stage(rank(pairwise=["3"])) == 0


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ({"send": 400.0, "recv": 400.0, "broadcast": 10.0}, 2),
        ({"send": 400.0, "recv": 400.0, "ddp_all_reduce": 100.0}, None),  # a parameter server in addition to DDP
        ({"send": 100.0, "recv": 100.0, "all_reduce": 100.0}, None),
        ({"send": 10.0}, None),
        ({}, None),
    ],
)
def test_ranks_of_a_whole_run_that_send_to_each_other_are_stages_only_without_other_collectives(calls, number) -> None:
    assert stage(rank(calls=calls, pairwise=["0"])) == number


def test_ranks_that_send_to_each_other_in_a_group_of_another_kind_are_not_stages() -> None:
    assert stage(rank(group_descriptions=["", "mesh_cp"], pairwise=["1"])) is None
    assert stage(rank(group_descriptions=["", "mesh_cp"], pairwise=["1", "3"])) == 0


def test_the_stage_is_unknown_if_the_ranks_of_the_group_are_unknown() -> None:
    cut = ["0-7", "0,1,2,3…ab12"]
    assert stage(rank(groups=cut, group_descriptions=["", "mesh_pp"])) is None
    assert stage(rank(5, group_descriptions=["", "mesh_pp"])) is None
    assert stage(rank(group_descriptions=["", "mesh_pp"], groups=["0-7", "2"])) is None
    assert stage(rank()) is None


@pytest.mark.parametrize(
    "descriptions",
    [
        ["", "mesh_dp", "mesh_tp", "mesh_pp"],
        ["", "DATA_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"],
        ["", "mesh_replicas", "mesh_tensor", "mesh_stages"],
        ["", "mesh_data_parallel", "mesh_tensor_parallel", "mesh_pipeline_parallel"],
        [
            "",
            "DATA_PARALLEL_GROUP_GLOO",
            "TENSOR_MODEL_PARALLEL_GROUP",
            "EMBEDDING_GROUP,PIPELINE_MODEL_PARALLEL_GROUP",
        ],
    ],
)
def test_the_place_in_each_kind_of_parallelism_follows_from_the_groups_descriptions(descriptions) -> None:
    assert coordinates(rank(group_descriptions=descriptions)) == {"dp": 1, "tp": 0, "pp": 0}


MESH = {"groups": ["0-7", "2,6", "0-3", "2-3", "0,2"]}
"""Rank 2 of two replicas of four ranks, which may be two shards of two context-parallel ranks."""


@pytest.mark.parametrize(
    ("descriptions", "places"),
    [
        (["", "mesh_dp_replicate", "mesh_dp_shard"], {"dp": 2}),
        (["", "mesh_replicate", "mesh_shard"], {"dp": 2}),
        (["", "mesh_dp_replicate", "mesh_fsdp"], {"dp": 2}),
        (["", "mesh_ddp", "mesh_fsdp"], {"dp": 2}),
        (["", "mesh_dp", "mesh_fsdp"], {"dp": 2}),
        (["", "mesh_ddp"], {"dp": 0}),
        (["mesh_fsdp"], {"dp": 2}),
        (["", "mesh_dp", "mesh_dp_shard_cp", "mesh_cp"], {"dp": 1, "cp": 0}),
        (["", "mesh_dp_replicate", "mesh_dp_shard_cp", "mesh_cp"], {"dp": 1, "cp": 0}),
        (["mesh_dp_cp", "mesh_dp_replicate", "mesh_dp_shard_cp", "mesh_cp"], {"dp": 1, "cp": 0}),
        (["mesh_dp", "mesh_dp_replicate", "mesh_dp_shard"], {"dp": 2}),
        (["mesh_batch", "mesh_efsdp", "mesh_ep"], {"dp": 2, "ep": 2}),
        (["", "", "mesh_dp_shard"], {"dp": 2}),
        (["", "mesh_dp_replicate"], {"dp": 0}),
        (["", "", "DATA_PARALLEL_GROUP_WITH_CP", "CONTEXT_PARALLEL_GROUP"], {"dp": 1, "cp": 0}),
        (["", "", "DATA_PARALLEL_GROUP_WITH_CP", "", "DATA_PARALLEL_GROUP"], {"dp": 1}),
        (["", "", "DATA_PARALLEL_GROUP,EXPERT_MODEL_PARALLEL_GROUP"], {"dp": 2, "ep": 2}),
        (["", "", "mesh_sp"], {"cp": 2}),
        (["pipe", "data", "EXPERT_PARALLEL_GROUP", "tensor"], {"pp": 2, "dp": 0, "ep": 2, "tp": 0}),
        (["", "", "EXPERT_DATA_PARALLEL_GROUP,EXPERT_TENSOR_PARALLEL_GROUP"], {}),
    ],
)
def test_a_place_may_follow_from_several_groups_or_several_places_from_one(descriptions, places) -> None:
    assert coordinates(rank(group_descriptions=descriptions, **MESH)) == places


def test_the_second_replica_follows_the_first() -> None:
    names = ["", "mesh_dp_replicate", "mesh_dp_shard"]
    assert coordinates(rank(6, group_descriptions=names, groups=["0-7", "2,6", "4-7"])) == {"dp": 6}


def test_without_descriptions_no_place_is_known() -> None:
    assert coordinates(rank()) == {}
