"""The parallel layouts that the straggler job trains with: each returns a model and its step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from testing.job.model import BATCH, CLASSES, WIDTH, loss_of
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4

Step = Callable[[torch.Tensor], torch.Tensor]  # forward, backward and averaging; returns the loss


@cache
def mesh(*names: str) -> DeviceMesh:
    """Return all ranks in one dimension, or in two, the second of size 2."""
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks // 2, 2) if len(names) == 2 else (ranks,), mesh_dim_names=names)


def step_of(model: nn.Module, after_backward: Callable[[], None] = lambda: None) -> Step:
    """Return a plain step."""

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(inputs))
        loss.backward()
        after_backward()
        return loss

    return step


def averaged(part: nn.Module, step: Step, replicas: DeviceMesh) -> tuple[nn.Module, Step]:
    """Return the model and its step, which then averages the gradients over these ranks."""

    def averaging(inputs: torch.Tensor) -> torch.Tensor:
        loss = step(inputs)
        average_gradients(part, replicas.get_group())
        return loss

    return part, averaging


def ddp(model: nn.Sequential) -> tuple[nn.Module, Step]:
    replica = DistributedDataParallel(model)
    return replica, step_of(replica)


def fsdp2(model: nn.Sequential, over: str = "ranks") -> tuple[nn.Module, Step]:
    """Shard over all ranks."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh(*over.split()))
    return model, step_of(model)


def hsdp(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Shard over two ranks, replicate over two."""
    return fsdp2(model, "replicas shards")


def by_hand(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Average the gradients in the script, with one collective."""
    return model, step_of(model, lambda: average_gradients(model))


def by_hand_in_a_stream(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Average in a separate stream, as Megatron and DeepSpeed do; only the asynchronous device has streams."""
    own = torch.cuda.Stream()

    def average() -> None:
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            average_gradients(model)
        torch.cuda.current_stream().wait_stream(own)

    return model, step_of(model, average)


def tensor_and_data(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Split each layer into two parts, and replicate the result."""
    both = mesh("data", "tensor")
    split = parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(split, mesh=both["data"])
    return split, step_of(split)


def pipeline_and_data(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Train two stages with one forward, one backward, and replicate them."""
    both = mesh("data", "stages")
    return averaged(*staged(model, both["stages"], MICRO_BATCHES), both["data"])


def pipeline(model: nn.Sequential, micro_batches: int = MICRO_BATCHES) -> tuple[nn.Module, Step]:
    """Train a stage on each rank, with one forward, one backward."""
    return staged(model, mesh("pp"), micro_batches)


def few_micro_batches(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Use few micro-batches, so that the stages are idle for most of the time."""
    return pipeline(model, 2)


def interleaved(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Train two stages on each rank, with interleaved one forward, one backward."""
    return staged(model, mesh("pp"), 2 * MICRO_BATCHES, schedule=ScheduleInterleaved1F1B, chunks=2)


def zero_bubble(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Compute the gradients of the weights while the pipeline would be empty."""
    return staged(model, mesh("pp"), 2 * MICRO_BATCHES, schedule=ScheduleInterleavedZeroBubble, chunks=2)


def experts(model: nn.Sequential, hot: int | None = None) -> tuple[nn.Module, Step]:
    """Send each token to the rank with its expert and back; half of them go to a hot expert, if there is one."""
    mixture = Experts(model, hot)

    def average() -> None:
        for layer in (model[0], model[2]):
            average_gradients(layer)

    return mixture, step_of(mixture, average)


def hot_expert(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Send most tokens to one rank."""
    return experts(model, int(os.environ["HOT_EXPERT"]))


class Experts(nn.Module):
    """One expert on each rank; its work takes as long as it receives tokens."""

    def __init__(self, model: nn.Sequential, hot: int | None) -> None:
        super().__init__()
        ranks, own = dist.get_world_size(), dist.get_rank()
        counts = [BATCH // ranks] * ranks
        if hot is not None:
            counts = [BATCH // 2 if rank == hot else BATCH // 2 // (ranks - 1) for rank in range(ranks)]
        self.model = model
        self._counts, self._received = counts, [counts[own]] * ranks
        behavior, share = model[1].behavior, sum(self._received) / BATCH
        model[1].behavior = replace(behavior, forward=share * behavior.forward, backward=share * behavior.backward)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the result of each token."""
        first, work, last = self.model
        tokens = first(inputs)[: sum(self._counts)]
        routed = all_to_all_single_autograd(tokens, self._received, self._counts, dist.group.WORLD)
        done = all_to_all_single_autograd(work(routed), self._counts, self._received, dist.group.WORLD)
        result: torch.Tensor = last(done)
        return result


def three_dimensions(model: nn.Sequential) -> tuple[nn.Module, Step]:
    """Train two stages in two replicas, with two ranks for each layer."""
    whole = init_device_mesh("cpu", (dist.get_world_size() // 4, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    return averaged(*staged(model, whole["pp"], MICRO_BATCHES, Together(whole["tp"].get_group())), whole["dp"])


class Together(nn.Module):
    """A layer in which the ranks of a group wait for each other, as in tensor parallelism."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input, once all ranks have arrived."""
        dist.all_reduce(inputs.detach().clone(), group=self._group)
        return inputs


def staged(
    model: nn.Sequential,
    stages: DeviceMesh,
    micro_batches: int,
    *more: nn.Module,
    schedule: Callable[..., Any] | None = None,
    chunks: int = 1,
) -> tuple[nn.Module, Step]:
    """Return this rank's stages, with `more` modules at the end of each, and the steps of the pipeline.

    With several chunks, a rank has as many stages, one in each pass through all ranks.
    """
    ranks, work = stages.size(), model[1]
    last = ranks * chunks - 1
    numbers = range(stages.get_local_rank(), last + 1, ranks)
    work.behavior = replace(work.behavior, micro_steps=micro_batches * chunks)
    parts = {number: nn.Sequential(*_modules(model, number, last), *more) for number in numbers}
    built = [_stage(part, number, last, BATCH // micro_batches, stages) for number, part in parts.items()]
    # With fewer micro-batches than stages there is no steady state of one forward, one backward.
    kind = schedule or (Schedule1F1B if micro_batches > last else ScheduleGPipe)
    steps = kind(built if chunks > 1 else built[0], micro_batches, loss_fn=lambda found, _target: loss_of(found))

    def step(inputs: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = [torch.zeros(())]
        if 0 in numbers:
            steps.step(inputs)
        elif last in numbers:
            steps.step(target=inputs, losses=losses)
        else:
            steps.step()
        return losses[-1]

    return nn.ModuleList(parts.values()) if chunks > 1 else parts[numbers[0]], step


def _modules(model: nn.Sequential, number: int, last: int) -> list[nn.Module]:
    if number == 0:
        return [*model[:2]]
    return [*model[1:]] if number == last else [model[1], nn.Linear(WIDTH, WIDTH)]


def _stage(part: nn.Module, number: int, last: int, size: int, stages: DeviceMesh) -> PipelineStage:
    """Return the stage with its shapes: otherwise stages send these to each other, as values that must be correct."""
    inputs = torch.zeros(size, WIDTH, requires_grad=number > 0)
    outputs = torch.zeros(size, CLASSES if number == last else WIDTH, requires_grad=True)
    cpu = torch.device("cpu")
    return PipelineStage(part, number, last + 1, cpu, input_args=inputs, output_args=outputs, group=stages.get_group())


TRAININGS = {
    build.__name__: build
    for build in (
        *(ddp, fsdp2, hsdp, by_hand, by_hand_in_a_stream, tensor_and_data),
        *(pipeline_and_data, pipeline, few_micro_batches, interleaved, zero_bubble, three_dimensions),
        *(experts, hot_expert),
    )
}


def average_gradients(model: nn.Module, group: Any = None) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
