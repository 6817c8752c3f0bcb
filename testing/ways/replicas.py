"""Variants of DistributedDataParallel."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from testing.ways.run import FEATURES, Parameters, Run, mlp, parameters, rank, sgd, train


def ddp(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp())
    return train(run, model, sgd(model))


def buffers(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp(torch.nn.BatchNorm1d(32)))
    return train(run, model, sgd(model))


def static_graph(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp(), static_graph=True)
    return train(run, model, sgd(model))


def unused_parameters(run: Run) -> Parameters:
    module = mlp()
    module.register_module("idle", torch.nn.Identity())
    module.idle.weight = torch.nn.Parameter(torch.ones(3))
    model = DistributedDataParallel(module, find_unused_parameters=True)
    return train(run, model, sgd(model))


def fp16_hook(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(run, model, sgd(model))


def power_sgd_hook(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp())
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)
    return train(run, model, sgd(model))


def uneven_inputs(run: Run) -> Parameters:
    """Give rank 0 two more batches than the others, which join in with Join."""
    model = DistributedDataParallel(mlp())
    with model.join():
        return train(run, model, sgd(model), batches=run.loader(run.steps - 2 * (rank() > 0)))


def no_sync(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches(run.loader(2 * run.steps))):
        with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            cross_entropy(model(inputs), targets).backward()
        if number % 2:
            optimizer.step()
            run.end_step()
            optimizer.zero_grad()
    return parameters(model)


def sync_flag(run: Run) -> Parameters:
    """Accumulate with the attribute that some frameworks set instead of using no_sync."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches(run.loader(2 * run.steps))):
        model.require_backward_grad_sync = number % 2 == 1
        cross_entropy(model(inputs), targets).backward()
        if number % 2:
            optimizer.step()
            run.end_step()
            optimizer.zero_grad()
    return parameters(model)


def gan(run: Run) -> Parameters:
    """Alternate two DDP modules with two optimizers; the discriminator's step comes first in each round."""
    generator = DistributedDataParallel(torch.nn.Linear(4, FEATURES))
    discriminator = DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
    optimizer, discriminator_optimizer = sgd(generator), sgd(discriminator)
    for inputs, _ in run.batches():
        forged = generator(inputs[:, :4])
        (discriminator(torch.cat([inputs, -forged.detach()])).mean()).backward()
        discriminator_optimizer.step()
        run.end_step()
        discriminator_optimizer.zero_grad()
        discriminator(forged).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        discriminator_optimizer.zero_grad()
    return parameters(generator, discriminator)


def compiled(run: Run) -> Parameters:
    model = torch.compile(DistributedDataParallel(mlp()), backend="aot_eager")
    return train(run, model, sgd(model))


def clipped(run: Run) -> Parameters:
    model = DistributedDataParallel(mlp())

    def clip(model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return train(run, model, sgd(model), after_backward=clip)
