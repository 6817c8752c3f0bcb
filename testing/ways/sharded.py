"""FSDP2 (`fully_shard`), alone and on meshes of two dimensions."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from testing.ways.run import Parameters, Run, mlp, parameters, sgd, train


def shard(model: torch.nn.Sequential, **options: object) -> FSDPModule:
    for layer in (model[0], model[-1]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(run: Run) -> Parameters:
    model = shard(mlp())
    return train(run, model, sgd(model))


def fsdp2_clipped(run: Run) -> Parameters:
    model = shard(mlp())

    def clip(model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return train(run, model, sgd(model), after_backward=clip)


def fsdp2_accumulating(run: Run) -> Parameters:
    model = shard(mlp())
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches(run.loader(2 * run.steps))):
        model.set_requires_gradient_sync(number % 2 == 1)
        cross_entropy(model(inputs), targets).backward()
        if number % 2:
            optimizer.step()
            run.end_step()
            optimizer.zero_grad()
    return parameters(model)


def hybrid(run: Run) -> Parameters:
    """Shard over two ranks, replicate over two."""
    model = shard(mlp(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return train(run, model, sgd(model))


def tensor_parallel_and_fsdp2(run: Run) -> Parameters:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(mlp(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return train(run, model, sgd(model))
