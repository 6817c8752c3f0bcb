"""The wait for batches, and `rankscope.timed`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from testing.own_record import seconds
from tests.trainer_hooks.probes.batches import Training
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope.record.layout import DATA_WAIT
from rankscope.timeline.timeline import Timeline


def test_timed_yields_the_same_items_and_counts_wait_and_samples(training: Training) -> None:
    batches = [(torch.randn(3, 8),), (torch.randn(2, 8),), (torch.randn(4, 8),)]
    got = []
    for batch in rankscope.timed(batches):
        training.step(batch)
        got.append(batch)
    assert all(one is other for one, other in zip(got, batches, strict=True))
    assert training.samples == 9
    assert seconds(training.timeline, DATA_WAIT) > 0


def test_timed_is_an_iterator_watched_or_not(run_dir: object) -> None:
    assert next(rankscope.timed([1, 2])) == 1
    rankscope.instrument()
    assert next(rankscope.timed([1, 2])) == 1
    assert list(rankscope.timed(iter("ab"))) == ["a", "b"]
    with pytest.raises(TypeError, match="not iterable"):
        rankscope.timed(3)
    rankscope.uninstrument()


def test_the_script_gets_an_error_of_its_iterable(timeline: Timeline) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("user error")

    batches = rankscope.timed(failing())
    assert next(batches) == 1
    with pytest.raises(ZeroDivisionError, match="user error"):
        next(batches)


def test_the_start_of_a_loader_is_data_wait(training: Training) -> None:
    class SlowStart(list[int]):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.05)
            return super().__iter__()

    training.step(torch.randn(1, 1, 8))
    iter(DataLoader(TensorDataset(torch.randn(4, 8)), sampler=SlowStart(range(4)), batch_size=None))
    assert seconds(training.timeline, DATA_WAIT) >= 0.05
