"""The inputs of a way to train: number of steps, data, a tiny model, and clocks that are independent of Rankscope."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, default_collate

Batch = tuple[torch.Tensor, torch.Tensor]
Parameters = list[torch.Tensor]

FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 16, 32, 4, 8
FETCH_SECONDS = 0.002  # for each batch: long enough that independent clocks agree within 2%


class Samples(Dataset[Batch]):
    """A rank's random samples, the same at each reading."""

    def __init__(self, length: int) -> None:
        random = torch.Generator().manual_seed(1 + rank())
        self._inputs = torch.randn(length, FEATURES, generator=random)
        self._targets = torch.randint(0, CLASSES, (length,), generator=random)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Batch:
        return self._inputs[index], self._targets[index]


class Run:
    """One training run of one way. The clocks start at the end of the first step: all before is start-up."""

    def __init__(self, steps: int, directory: Path) -> None:
        self.steps = steps
        self.directory = directory
        self.seconds: dict[str, float] = {}  # by phase
        self.batches_seen = self.fetches = 0  # in all; since the first step ended
        self.ends: list[float] = []  # of the steps
        torch.manual_seed(0)

    def loader(self, batches: int | None = None, **options: Any) -> DataLoader[Batch]:
        """Return a loader of `batches` batches, by default one a step."""
        length = BATCH_SIZE * (self.steps if batches is None else batches)
        return DataLoader(Samples(length), batch_size=BATCH_SIZE, collate_fn=slow_collate, **options)

    def batches(self, source: Iterable[Any] | None = None) -> Iterator[Any]:
        """Yield the batches of the source, and measure how long they take."""
        source = self.loader() if source is None else source
        with self.clock("data_wait"):  # an epoch of persistent workers starts here
            iterator = iter(source)
        nothing = object()
        while True:
            with self.clock("data_wait"):
                batch = next(iterator, nothing)
            if batch is nothing:
                return
            self.batches_seen += 1
            self.fetches += bool(self.ends)
            yield batch

    def end_step(self) -> None:
        """Mark the end of a step, right after the optimizer's."""
        self.ends.append(time.perf_counter())

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Measure a phase in the block."""
        began = time.perf_counter()
        yield
        if self.ends:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def slow_collate(samples: list[Batch]) -> Batch:
    """Return a batch after a delay."""
    time.sleep(FETCH_SECONDS)
    return tuple(default_collate(samples))


def rank() -> int:
    """Return this process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def mlp(*extra: torch.nn.Module) -> torch.nn.Sequential:
    """Return the model of all ways; `extra` modules are between its two layers."""
    first, last = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)
    return torch.nn.Sequential(first, *extra, torch.nn.ReLU(), last)


def train(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Parameters:
    """Train in the common loop. `batches` are other data; `after_backward` is called before the optimizer."""
    for inputs, targets in run.batches(options.get("batches")):
        cross_entropy(model(inputs), targets).backward()
        if "after_backward" in options:
            options["after_backward"](model)
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
    return parameters(model)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most ways. It has a state, so that a difference in one step shows in the next."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def parameters(*models: torch.nn.Module) -> Parameters:
    """Return copies of all parameters and buffers; of sharded ones, this rank's part."""
    state = [tensor for model in models for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    return [(tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone() for tensor in state]
