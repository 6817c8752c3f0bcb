"""A small training whose record counts samples and tokens, and batches of several kinds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from testing.own_record import value
from torch.utils.data import DataLoader, TensorDataset

from rankscope.timeline.timeline import Timeline


def loader(samples: int = 22, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader; by default of six batches, the last of which has two samples."""
    return DataLoader(TensorDataset(torch.randn(samples, 8)), batch_size=batch_size, **options)


def evaluation() -> DataLoader[Any]:
    return loader(30, 3)


class Training:
    """A small model with one step per batch."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.model = torch.nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, batches: Iterable[Any], on: Any = None) -> None:
        """Make a step with each batch, or for each batch with another one."""
        for batch in batches:
            self.step(batch if on is None else on)

    def step(self, batch: Any) -> None:
        self.backward(batch)
        self.optimizer.step()

    def backward(self, batch: Any) -> None:
        self.loss(batch).backward()

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.as_tensor(self.model(batch[0]).square().mean())

    @property
    def samples(self) -> float:
        return value(self.timeline, "samples")

    @property
    def tokens(self) -> float:
        return value(self.timeline, "tokens")


class Graphs:
    """An object with its own number of samples."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class Failing:
    @property
    def batch_size(self) -> int:
        raise RuntimeError("user error")


def packed(*lengths: int) -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.zeros(length, 4) for length in lengths], enforce_sorted=False)
