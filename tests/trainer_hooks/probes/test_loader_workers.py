"""The working and idle time of a loader's workers in the record."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from testing.own_record import seconds
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils

import rankscope
from rankscope.probes.loader_workers import CLOCK_ENTRIES, WorkerClock, WorkerTimeRecorder
from rankscope.record import layout
from rankscope.record.layout import INDEX, LOADER_WORKER_STATES
from rankscope.timeline.timeline import Timeline

PER_SAMPLE = 0.02  # seconds
WORKERS = 2


class Samples(Dataset[torch.Tensor]):
    """Ten samples that take PER_SAMPLE each and hold the ID of their process."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, _index: int) -> torch.Tensor:
        time.sleep(PER_SAMPLE)
        return torch.full((4,), float(os.getpid()))


class Stream(IterableDataset[torch.Tensor]):
    """The same samples as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Samples()[index] for index in range(5))


class Nested(Stream):
    """A loader inside a loader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DataLoader(Samples(), batch_size=None))


class Busy(Samples):
    """Slow samples, so that the worker cannot end at once."""

    seconds = 0.3

    def __init__(self) -> None:
        self.begins = multiprocessing.get_context("fork").Event()

    def __getitem__(self, _index: int) -> torch.Tensor:
        self.begins.set()
        time.sleep(self.seconds)
        return torch.zeros(4)


class Failing(Samples):
    """Samples that cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(PER_SAMPLE)
        raise ValueError(f"sample {index}")


def fork(dataset: Any, workers: int = WORKERS, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, num_workers=workers, multiprocessing_context="fork", **options)


def train(loader: DataLoader[torch.Tensor]) -> list[torch.Tensor]:
    """Fetch all batches, make two steps with their polls, and return the batches."""
    batches = list(loader)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return batches


def published(timeline: Timeline, state: str = "working") -> float:
    """Return the recorded seconds of worker time."""
    return float(timeline.writer.slots[INDEX["loader_worker_seconds"] + LOADER_WORKER_STATES.index(state)])


@pytest.mark.parametrize("dataset", [Samples(), Stream()], ids=["indexed", "iterable"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_time_of_every_worker_counts(timeline: Timeline, dataset: Any, persistent: bool) -> None:
    batches = train(fork(dataset, persistent_workers=persistent))
    assert len({float(batch[0, 0]) for batch in batches}) == WORKERS
    assert published(timeline) >= len(batches) * PER_SAMPLE


def test_the_time_adds_up_over_epochs_and_never_decreases(timeline: Timeline) -> None:
    loader, seen = fork(Samples()), []
    for _ in range(3):
        train(loader)
        seen.append(published(timeline))
    assert all(later - before >= 10 * PER_SAMPLE for before, later in zip([0.0, *seen], seen, strict=False))


def test_working_and_idle_sum_to_all_of_the_workers_time(timeline: Timeline) -> None:
    loader = fork(Samples(), persistent_workers=True)  # keeps its iterator after the epoch
    train(loader)
    before, began = sum(published(timeline, state) for state in LOADER_WORKER_STATES), timeline.last_event
    for _ in range(3):
        train(loader)
    after = sum(published(timeline, state) for state in LOADER_WORKER_STATES)
    assert after - before == pytest.approx(WORKERS * (timeline.last_event - began))
    assert published(timeline, "idle") > 0


def test_idle_time_never_decreases(timeline: Timeline) -> None:
    clock = WorkerClock()
    recorder, seen = WorkerTimeRecorder(timeline, clock), []
    loader = fork(Samples(), persistent_workers=True)
    train(loader)
    clock.reserve(1)
    for worked in (0.0, 50.0, 0.0):  # one batch took longer than the time since the last poll
        clock._seconds[0] += worked
        recorder.poll()
        seen.append(published(timeline, "idle"))
    assert seen == sorted(seen)
    assert published(timeline) == 50


def test_without_workers_there_is_no_time(timeline: Timeline) -> None:
    train(DataLoader(Samples()))
    assert published(timeline) == 0


def test_a_nested_loader_counts_once(timeline: Timeline) -> None:
    began = time.monotonic()
    train(fork(Nested(), workers=1))
    assert 10 * PER_SAMPLE <= published(timeline) <= time.monotonic() - began


def test_spawned_workers_are_not_counted_but_work(timeline: Timeline) -> None:
    batches = train(DataLoader(Samples(), num_workers=1, multiprocessing_context="spawn"))
    assert len(batches) == 10
    assert published(timeline) == 0


def test_a_sample_that_cannot_be_read_counts_and_raises(timeline: Timeline) -> None:
    with pytest.raises(ValueError, match="sample 0"):
        train(fork(Failing(), workers=1))
    train(DataLoader(Samples()))
    assert published(timeline) >= PER_SAMPLE


def test_the_rank_itself_keeps_torchs_fetchers(timeline: Timeline) -> None:
    before = _utils.fetch._MapDatasetFetcher.fetch
    train(fork(Samples()))
    assert _utils.fetch._MapDatasetFetcher.fetch is before


def test_entries_are_reused_after_many_epochs(timeline: Timeline) -> None:
    clock = WorkerClock()
    clock.reserve(CLOCK_ENTRIES - 1)
    clock.reserve(2)
    assert clock.total() == 0
    train(fork(Samples(), workers=1))
    assert published(timeline) >= 10 * PER_SAMPLE


def train_as_a_rank(timeline: Timeline, pipe: Any) -> None:
    for loader in (DataLoader(Samples()), fork(Samples(), workers=1)):
        train(loader)
        pipe.send(published(timeline))


def test_a_forked_rank_counts_only_its_own_workers(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork a rank from a launcher that has used a loader but has not trained."""
    monkeypatch.setattr(timeline, "on_event", lambda _phase: None)
    train(fork(Samples(), workers=1))
    before = published(timeline)
    mine, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=train_as_a_rank, args=(timeline, theirs))
    rank.start()
    assert mine.recv() == 0
    assert mine.recv() >= 10 * PER_SAMPLE
    rank.join()
    train(DataLoader(Samples()))
    assert published(timeline) == before > 0


def seconds_to_end(timeline: Timeline, make: Callable[..., DataLoader[torch.Tensor]]) -> float:
    """Return the data wait of a loop that ends while a worker makes a batch."""
    dataset = Busy()
    iterator = iter(make(dataset, num_workers=1, multiprocessing_context="fork"))
    dataset.begins.wait()
    before = seconds(timeline, layout.DATA_WAIT)
    del iterator
    return seconds(timeline, layout.DATA_WAIT) - before


def test_the_shutdown_of_a_loaders_workers_is_data_wait(timeline: Timeline) -> None:
    train(DataLoader(Samples()))
    assert seconds_to_end(timeline, DataLoader) >= Busy.seconds / 2


DEPRECATED = "ignore:'set_vital' is deprecated"  # torchdata calls it


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.filterwarnings(DEPRECATED)
def test_the_workers_of_a_stateful_loader_count_as_torchs_do(timeline: Timeline, stateful: Any) -> None:
    for epoch in range(1, 3):
        batches = train(stateful(Samples(), num_workers=WORKERS, multiprocessing_context="fork"))
        assert len(batches) == 10
        assert published(timeline) >= epoch * len(batches) * PER_SAMPLE
    assert published(timeline, "idle") > 0


@pytest.mark.filterwarnings(DEPRECATED)
def test_the_shutdown_of_a_stateful_loaders_workers_is_data_wait(timeline: Timeline, stateful: Any) -> None:
    train(stateful(Samples(), num_workers=1, multiprocessing_context="fork"))
    assert seconds_to_end(timeline, stateful) >= Busy.seconds / 2


@pytest.mark.filterwarnings(DEPRECATED)
def test_spawned_workers_of_a_stateful_loader_work(timeline: Timeline, stateful: Any) -> None:
    train(stateful(Samples(), num_workers=1, multiprocessing_context="fork"))
    before = published(timeline)
    assert len(train(stateful(Samples(), num_workers=1, multiprocessing_context="spawn"))) == 10
    assert published(timeline) == before


@pytest.mark.filterwarnings(DEPRECATED)
def test_uninstrument_restores_stateful_loaders(timeline: Timeline, stateful: Any) -> None:
    module, worker = (
        sys.modules[f"torchdata.stateful_dataloader.{name}"] for name in ("stateful_dataloader", "worker")
    )
    before = dict(vars(module)), dict(vars(worker)), dict(vars(stateful))
    train(stateful(Samples(), num_workers=1, multiprocessing_context="fork"))
    assert (dict(vars(module)), dict(vars(worker)), dict(vars(stateful))) != before
    assert published(timeline) > 0
    rankscope.uninstrument()
    assert (dict(vars(module)), dict(vars(worker)), dict(vars(stateful))) == before
