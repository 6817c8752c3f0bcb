"""Ranks that train on the same batches: only the first of them counts the samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from testing.leaving import leave
from testing.own_record import value
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from rankscope.timeline.timeline import Timeline

WORLD = 8


@pytest.fixture
def rank(request: pytest.FixtureRequest, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make this process one rank of eight; the others do not exist."""
    monkeypatch.setenv("RANKSCOPE_RUN", "alone")  # there is no other rank to agree with on a name
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    leave()


def samples(timeline: Timeline, parameter: torch.Tensor | None = None) -> float:
    """Return the rank's samples after three steps of eight."""
    weight = torch.nn.Parameter(torch.ones(1) if parameter is None else parameter)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for (batch,) in DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=8):
        loss = (weight.to_local() if isinstance(weight, DTensor) else weight).sum() * batch.sum()
        loss.backward()
        optimizer.step()
    return value(timeline, "samples")


@pytest.mark.parametrize("rank", [0, 1, 4, 7], indirect=True)
@pytest.mark.parametrize(
    ("names", "counts_at"),
    [
        (("dp", "tp"), {0, 4}),
        (("tp", "dp"), {0, 1}),
        (("dp_shard", "cp"), {0, 4}),
        (("data_parallel", "tensor_parallel"), {0, 4}),
        (("dp_replicate", "dp_shard"), {0, 1, 4, 7}),
        (("pipeline", "SP"), {0}),
        (("dp", "dp_shard_cp"), {0, 1, 4, 7}),
        (("dp", "ep"), {0, 1, 4, 7}),
    ],
)
def test_the_first_rank_along_a_shared_dimension_counts(
    timeline: Timeline, rank: int, names: tuple[str, str], counts_at: set[int]
) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    assert samples(timeline) == (24 if rank in counts_at else 0)
    assert mesh.ndim == 2


@pytest.mark.parametrize("rank", [0, 7], indirect=True)
@pytest.mark.parametrize(("placement", "is_shared"), [(Shard(0), False), (Shard(1), True), (Replicate(), True)])
def test_parameters_on_a_mesh_without_names_distinguish_tensor_parallelism_from_fsdp(
    timeline: Timeline, rank: int, placement: Shard | Replicate, is_shared: bool
) -> None:
    mesh = DeviceMesh("cpu", torch.arange(WORLD))
    parameter = DTensor.from_local(torch.ones(1, 1), mesh, [placement], run_check=False)
    assert samples(timeline, parameter) == (0 if is_shared and rank else 24)


@pytest.mark.parametrize("rank", [3], indirect=True)
def test_a_mesh_without_this_rank_changes_nothing(timeline: Timeline, rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("tp",))
    assert samples(timeline) == 24
    assert mesh.get_coordinate() is None
    assert rank == 3
