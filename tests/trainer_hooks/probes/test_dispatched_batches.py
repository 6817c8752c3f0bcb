"""Loaders that fetch on one rank and send each rank its part: each rank counts its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from testing.own_record import seconds, value
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline

RANKS = 2


class DataLoaderDispatcher:
    """Accelerate's class of this name without the broadcast."""

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader, self.rank = DataLoader(loader.dataset, batch_size=loader.batch_size), rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.rank:
            yield from (torch.ones(4, 1) for _ in range(3))
            return
        batches = iter(self.loader)
        for (batch,) in batches:
            yield torch.cat([batch, next(batches)[0]])[:4]


@pytest.fixture
def dispatcher(timeline: Timeline, load: Callable[..., object]) -> type[DataLoaderDispatcher]:
    load("accelerate.data_loader", DataLoaderDispatcher=DataLoaderDispatcher)
    return DataLoaderDispatcher


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_counts_its_part_from_the_first_batch_on(
    timeline: Timeline, dispatcher: type[DataLoaderDispatcher], rank: int
) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for batch in dispatcher(DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=4), rank):
        (weight * batch).sum().backward()
        optimizer.step()
    assert value(timeline, "samples") == 12
    assert seconds(timeline, layout.DATA_WAIT) > 0


def test_uninstrument_restores_the_loaders(timeline: Timeline, dispatcher: type[DataLoaderDispatcher]) -> None:
    before = vars(dispatcher)["__iter__"], timeline
    dispatcher(DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=4), 0)
    assert vars(dispatcher)["__iter__"] is not before[0]
    rankscope.uninstrument()
    assert vars(dispatcher)["__iter__"] is before[0]
