"""Gradients that the script averages by hand, after the backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist

from testing.ways.run import Parameters, Run, mlp, sgd, train


def all_reduce(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, sgd(model), after_backward=_all_reduce)


def async_all_reduce(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, sgd(model), after_backward=_async_all_reduce)


def all_gather(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, sgd(model), after_backward=_all_gather)


def one_flat_tensor(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, sgd(model), after_backward=_all_gather_into_tensor)


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _all_reduce(model: torch.nn.Module) -> None:
    for gradient in _gradients(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def _async_all_reduce(model: torch.nn.Module) -> None:
    works = [dist.all_reduce(gradient, async_op=True) for gradient in _gradients(model)]
    for work in works:
        work.wait()
    for gradient in _gradients(model):
        gradient /= dist.get_world_size()


def _all_gather(model: torch.nn.Module) -> None:
    for gradient in _gradients(model):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        gradient.copy_(torch.stack(parts).mean(0))


def _all_gather_into_tensor(model: torch.nn.Module) -> None:
    gradients = _gradients(model)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    gathered = torch.empty(dist.get_world_size() * flat.numel())
    dist.all_gather_into_tensor(gathered, flat)
    mean = gathered.view(dist.get_world_size(), -1).mean(0)
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
