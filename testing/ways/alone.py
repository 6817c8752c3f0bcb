"""One process: variants of the loader, the optimizer, the precision and the graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from testing.ways.run import (
    BATCH_SIZE,
    CLASSES,
    FEATURES,
    Batch,
    Parameters,
    Run,
    Samples,
    mlp,
    parameters,
    sgd,
    slow_collate,
    train,
)


def plain(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, sgd(model))


def own_batching(run: Run) -> Parameters:
    """Train without a DataLoader: the data wait is unknown."""
    model, samples = mlp(), Samples(BATCH_SIZE * run.steps)
    optimizer = sgd(model)
    for first in range(0, len(samples), BATCH_SIZE):
        inputs, targets = slow_collate([samples[index] for index in range(first, first + BATCH_SIZE)])
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(model)


class Stream(IterableDataset[Batch]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Batch]:
        return (self._samples[index] for index in range(len(self._samples)))


def iterable_dataset(run: Run) -> Parameters:
    model, stream = mlp(), Stream(Samples(BATCH_SIZE * run.steps))
    return train(run, model, sgd(model), batches=DataLoader(stream, batch_size=BATCH_SIZE, collate_fn=slow_collate))


def persistent_workers(run: Run) -> Parameters:
    model = mlp()
    optimizer = sgd(model)
    loader = run.loader(run.steps // 2, num_workers=1, persistent_workers=True)
    for _epoch in range(2):
        state = train(run, model, optimizer, batches=loader)
    with run.clock("data_wait"):
        del loader  # ends its workers
    return state


def accumulation(run: Run) -> Parameters:
    model = mlp()
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches(run.loader(2 * run.steps))):
        (cross_entropy(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            run.end_step()
            optimizer.zero_grad()
    return parameters(model)


def autocast(run: Run) -> Parameters:
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        return train(run, model, sgd(model))


def grad_scaler(run: Run) -> Parameters:
    """Skip two steps because a gradient is not finite. The scale ends above 2**63: without overflows, as in bf16, it
    doubles every 2,000 steps as long as the run lasts.
    """
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**61, growth_interval=1)
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches()):
        overflows = number in (2, 5)
        scaler.scale(cross_entropy(model(inputs), targets) * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        if not overflows:
            run.end_step()
        scaler.update()
        optimizer.zero_grad()
    return [*parameters(model), torch.tensor(scaler.get_scale())]


def fused_optimizer(run: Run) -> Parameters:
    model = mlp()
    return train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def two_optimizers(run: Run) -> Parameters:
    """Use two optimizers in each step; the first ends it."""
    model = mlp()
    first, last = sgd(model[0]), sgd(model[2])
    for inputs, targets in run.batches():
        cross_entropy(model(inputs), targets).backward()
        first.step()
        run.end_step()
        last.step()
        model.zero_grad()
    return parameters(model)


def optimizer_in_backward(run: Run) -> Parameters:
    model = mlp()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for inputs, targets in run.batches():
        cross_entropy(model(inputs), targets).backward()
        run.end_step()
    return parameters(model)


def closure(run: Run) -> Parameters:
    """Use LBFGS, which evaluates the model several times in one optimizer step."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for inputs, targets in run.batches():

        def evaluate(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(evaluate)
        run.end_step()
    return parameters(model)


def compiled(run: Run) -> Parameters:
    model = torch.compile(mlp(), backend="aot_eager")
    return train(run, model, sgd(model))


class Recomputed(torch.nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)


def activation_checkpointing(run: Run) -> Parameters:
    model = torch.nn.Sequential(Recomputed(*mlp()), torch.nn.Linear(CLASSES, CLASSES))
    return train(run, model, sgd(model))


def reentrant_checkpointing(run: Run) -> Parameters:
    model, head = mlp(), torch.nn.Linear(CLASSES, CLASSES)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    for inputs, targets in run.batches():
        hidden = checkpoint(model, inputs.requires_grad_(), use_reentrant=True)
        cross_entropy(head(hidden), targets).backward()
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(model, head)


def checkpoints(run: Run) -> Parameters:
    """Save the state after every fourth step."""
    model, ballast = mlp(), torch.zeros(1 << 20)  # 4 MB: long enough that the error of the clock is small
    optimizer = sgd(model)
    for number, (inputs, targets) in enumerate(run.batches()):
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
        if number % 4 == 3:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ballast": ballast}
            with run.clock("checkpoint"):
                torch.save(state, run.directory / "checkpoint.pt")
    return parameters(model)


def random_inputs(run: Run) -> Parameters:
    """Make inputs on the spot, as in reinforcement learning; the optimizer still ends steps."""
    model = mlp()
    optimizer = sgd(model)
    for _ in range(run.steps):
        model(torch.randn(BATCH_SIZE, FEATURES)).square().mean().backward()
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(model)
