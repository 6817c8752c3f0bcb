"""One model over several ranks: in stages (pipeline), or with each layer in parts (tensor parallel)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from testing.ways.run import BATCH_SIZE, HIDDEN, Parameters, Run, mlp, parameters, rank, sgd, train

MICRO_BATCHES = 4


def tensor_parallel(run: Run) -> Parameters:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(run, model, sgd(model))


def gpipe(run: Run) -> Parameters:
    return _pipeline(run, ScheduleGPipe)


def one_forward_one_backward(run: Run) -> Parameters:
    return _pipeline(run, Schedule1F1B)


def _pipeline(run: Run, schedule: type[ScheduleGPipe] | type[Schedule1F1B]) -> Parameters:
    part = _stage()
    stage = PipelineStage(part, rank(), 2, torch.device("cpu"))
    pipeline, optimizer = schedule(stage, MICRO_BATCHES, loss_fn=cross_entropy), sgd(part)
    for inputs, targets in run.batches():
        if rank() == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=targets)
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(part)


def send_and_receive(run: Run) -> Parameters:
    """Run a pipeline of two by hand: activations go to rank 1, their gradient comes back."""
    part = _stage()
    optimizer = sgd(part)
    for inputs, targets in run.batches():
        (_first if rank() == 0 else _last)(part, inputs, targets)
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(part)


def _stage() -> torch.nn.Sequential:
    model = mlp()
    return model[:2] if rank() == 0 else model[2:]


def _first(part: torch.nn.Module, inputs: torch.Tensor, _targets: torch.Tensor) -> None:
    activations = part(inputs)
    dist.send(activations.detach(), 1)
    gradient = torch.empty_like(activations)
    dist.recv(gradient, 1)
    activations.backward(gradient)


def _last(part: torch.nn.Module, _inputs: torch.Tensor, targets: torch.Tensor) -> None:
    activations = torch.empty(BATCH_SIZE, HIDDEN)
    dist.recv(activations, 0)
    activations.requires_grad_()
    cross_entropy(part(activations), targets).backward()
    assert activations.grad is not None
    dist.send(activations.grad, 0)
