"""Faults of the gauntlet's ranks and GPUs reach the node of the rank, if there are several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from testing.job.launch import RANKS
from validation.gauntlet import node_job
from validation.gauntlet.arena import Arena, NodesJob

from rankscope_exporter.simulation import simulated_uuid

NODES = 2


def test_a_fault_of_a_gpu_is_on_the_node_of_its_rank_and_nowhere_else(tmp_path: Path) -> None:
    arena = Arena(tmp_path, tmp_path, nodes=NODES)
    rank = RANKS - 1
    arena.change_gpu(rank, busy=0.3)
    ((changed,), other) = (list((tmp_path / "gpus" / node_job.node(index)).iterdir()) for index in (NODES - 1, 0))
    assert not other
    scenario = yaml.safe_load((tmp_path / "node-1/exporter.yml").read_text())
    assert _gpu_of(rank, tmp_path) == simulated_uuid(int(changed.stem), scenario["machine"])


def test_a_spare_gpu_is_on_the_last_node(tmp_path: Path) -> None:
    arena = Arena(tmp_path, tmp_path, nodes=NODES)
    arena.claim(RANKS)
    assert [path.name for path in (tmp_path / "claims/node-1").iterdir()] == [str(RANKS // NODES)]


def _gpu_of(rank: int, directory: Path) -> str:
    """Return the UUID of the GPU that the rank's script names."""
    job = NodesJob(directory, "train", directory, ranks_per_node=RANKS // NODES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {**job.environment(), "RANK": str(rank)})
        node_job.move_to_node()
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
