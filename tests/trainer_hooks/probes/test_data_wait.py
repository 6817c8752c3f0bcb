"""Batches: how long they were waited for, and how many samples and tokens the training took from them."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rankscope
from rankscope.probes.data_wait import size_of
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

IDS = torch.zeros(4, 16, dtype=torch.long)


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """22 samples in six batches; the last has two."""
    return DataLoader(TensorDataset(torch.randn(22, 8)), batch_size=4)


class Training:
    """One step for each batch that it is given."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: Any) -> None:
        self.backward(batch)
        self.optimizer.step()

    def backward(self, batch: Any) -> None:
        self.model(batch[0]).square().mean().backward()


def value(timeline: Timeline, field: str) -> float:
    return float(timeline.writer.slots[INDEX[field]])


def test_every_sample_counts_once_and_with_the_step_that_it_was_fetched_for(timeline: Timeline, loader: Any) -> None:
    training, seen = Training(), []
    for batch in loader:
        training.step(batch)
        seen.append(value(timeline, "samples"))
    assert seen == [4, 8, 12, 16, 20, 22]


def test_the_ring_has_the_samples_of_each_step(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for batch in loader:
        training.step(batch)
    entry = timeline.writer.ring[3].tolist()
    assert entry[0] == 3
    assert entry[2] == 12


def test_batches_of_several_epochs_and_loaders_add_up(timeline: Timeline, loader: Any) -> None:
    training, other = Training(), DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=2)
    for _ in range(2):
        for batch, extra in zip(loader, other, strict=True):
            training.step(batch)
            training.backward(extra)
    assert value(timeline, "samples") == 2 * (22 + 12)


def test_micro_batches_fetched_before_the_first_backward_all_count(timeline: Timeline, loader: Any) -> None:
    training, batches = Training(), iter(loader)
    for _ in range(3):
        micro_batches = [next(batches), next(batches)]
        for batch in micro_batches:
            training.backward(batch)
        training.optimizer.step()
    assert value(timeline, "samples") == 22


@pytest.mark.parametrize("way", ["phase", "no_grad", "nothing"])
def test_an_evaluations_batches_do_not_count(timeline: Timeline, loader: Any, way: str) -> None:
    training, evaluation = Training(), DataLoader(TensorDataset(torch.randn(30, 8)), batch_size=3)
    for number, batch in enumerate(loader):
        if number % 3 == 0:
            with {"phase": rankscope.phase("evaluation"), "no_grad": torch.no_grad(), "nothing": torch.enable_grad()}[
                way
            ]:
                for inputs in evaluation:
                    training.model(inputs[0])
        training.step(batch)
    for inputs in evaluation:  # at the end of the training, and no step follows
        training.model(inputs[0])
    assert value(timeline, "samples") == 22


def test_a_loader_with_workers_counts_the_same(timeline: Timeline) -> None:
    training = Training()
    for batch in DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4, num_workers=1):
        training.step(batch)
    assert value(timeline, "samples") == 12


def test_a_stream_of_batches_made_by_the_dataset_counts_by_their_leading_dimension(timeline: Timeline) -> None:
    class Stream(IterableDataset[tuple[torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
            return iter([(torch.randn(5, 8),), (torch.randn(3, 8),)])

    training = Training()
    for batch in DataLoader(Stream(), batch_size=None):
        training.step(batch)
    assert value(timeline, "samples") == 8


def test_batches_without_a_tensor_count_by_the_loaders_batch_size(timeline: Timeline) -> None:
    texts: Any = ["a", "b", "c", "d"]
    training = Training()
    for _text in DataLoader(texts, batch_size=2, collate_fn=" ".join):
        training.step((torch.randn(1, 8),))
    assert value(timeline, "samples") == 4


def test_tokens_are_the_elements_of_input_ids(timeline: Timeline) -> None:
    rows: Any = [{"labels": torch.zeros(1), "input_ids": torch.zeros(16)} for _ in range(6)]
    training = Training()
    for _batch in DataLoader(rows, batch_size=3):
        training.step((torch.randn(1, 8),))
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (6, 96)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (IDS, (4, 0)),
        ((IDS[:2], IDS), (2, 0)),
        ([torch.tensor(3.0), {"pixels": IDS}], (4, 0)),
        ({"name": "x", "pixels": IDS[:3]}, (3, 0)),
        ({"input_ids": IDS, "labels": IDS[:1]}, (4, 64)),
        (UserDict({"input_ids": IDS}), (4, 64)),
        (({"input_ids": IDS}, torch.zeros(9)), (4, 64)),
        ({"input_ids": [1, 2, 3]}, (0, 0)),
        ("text", (0, 0)),
        (torch.tensor(1.0), (0, 0)),
        ([], (0, 0)),
        (7, (0, 0)),
    ],
)
def test_the_size_of_a_batch(batch: object, size: tuple[float, float]) -> None:
    assert size_of(batch) == size


def test_timed_yields_the_same_items_and_counts_wait_and_samples(timeline: Timeline) -> None:
    batches = [(torch.randn(3, 8),), (torch.randn(2, 8),), (torch.randn(4, 8),)]
    training, got = Training(), []
    for batch in rankscope.timed(batches):
        training.step(batch)
        got.append(batch)
    assert all(mine is theirs for mine, theirs in zip(got, batches, strict=True))
    assert value(timeline, "samples") == 9
    assert timeline.writer.slots[INDEX["phase_seconds"] + layout.DATA_WAIT] > 0


def test_timed_is_an_iterator_watched_or_not(run_dir: object) -> None:
    assert next(rankscope.timed([1, 2])) == 1
    rankscope.instrument()
    assert next(rankscope.timed([1, 2])) == 1
    assert list(rankscope.timed(iter("ab"))) == ["a", "b"]
    with pytest.raises(TypeError, match="not iterable"):
        rankscope.timed(3)  # type: ignore[arg-type]
    rankscope.uninstrument()


def test_timed_around_a_loader_counts_its_batches_once(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for batch in rankscope.timed(loader):
        training.step(batch)
    assert value(timeline, "samples") == 22


def test_an_error_in_the_iterable_is_the_scripts(timeline: Timeline) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("the user's own")

    batches = rankscope.timed(failing())
    assert next(batches) == 1
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        next(batches)


def test_what_the_script_says_of_a_step_is_what_counts(timeline: Timeline, loader: Any) -> None:
    rankscope.step()
    for batch in loader:
        Training().step(batch)
        rankscope.step(samples=100, tokens=2000)
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (600, 12000)


def test_a_step_may_tell_tokens_alone(timeline: Timeline) -> None:
    rankscope.step(tokens=5)
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (0, 5)


def test_what_starting_a_loader_takes_is_data_wait(timeline: Timeline) -> None:
    class SlowToBegin(list[int]):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.05)
            return super().__iter__()

    Training().step(torch.randn(1, 1, 8))
    iter(DataLoader(TensorDataset(torch.randn(4, 8)), sampler=SlowToBegin(range(4)), batch_size=None))
    assert timeline.writer.slots[INDEX["phase_seconds"] + layout.DATA_WAIT] >= 0.05
