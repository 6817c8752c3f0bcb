"""Batches: the wait for them, and the samples and tokens of the batches that were trained on."""

from __future__ import annotations

import itertools
import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import rankscope
from rankscope.probes.batch_size import size_of
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

IDS = torch.zeros(4, 16, dtype=torch.long)


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Make a loader of 22 samples in six batches; the last one has two."""
    return DataLoader(TensorDataset(torch.randn(22, 8)), batch_size=4)


class Training:
    """A small model with one step per batch."""

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


def test_every_sample_counts_once_in_the_step_that_uses_it(timeline: Timeline, loader: Any) -> None:
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


@pytest.mark.parametrize("kind", ["phase", "no_grad", "plain"])
def test_an_evaluations_batches_do_not_count(timeline: Timeline, loader: Any, kind: str) -> None:
    training, evaluation = Training(), DataLoader(TensorDataset(torch.randn(30, 8)), batch_size=3)
    for number, batch in enumerate(loader):
        if number % 3 == 0:
            with {"phase": rankscope.phase("evaluation"), "no_grad": torch.no_grad(), "plain": torch.enable_grad()}[
                kind
            ]:
                for inputs in evaluation:
                    training.model(inputs[0])
        training.step(batch)
    for inputs in evaluation:  # after the last step
        training.model(inputs[0])
    assert value(timeline, "samples") == 22


def test_a_loader_with_workers_counts_the_same(timeline: Timeline) -> None:
    training = Training()
    for batch in DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4, num_workers=1):
        training.step(batch)
    assert value(timeline, "samples") == 12


def test_a_stream_of_batches_counts_by_their_leading_dimension(timeline: Timeline) -> None:
    class Stream(IterableDataset[tuple[torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
            return iter([(torch.randn(5, 8),), (torch.randn(3, 8),)])

    training = Training()
    for batch in DataLoader(Stream(), batch_size=None):
        training.step(batch)
    assert value(timeline, "samples") == 8


class Texts(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abcde")


@pytest.mark.parametrize(("drop_last", "samples"), [(True, 4), (False, 0)])
def test_texts_of_a_stream_count_if_every_batch_is_full(timeline: Timeline, drop_last: bool, samples: int) -> None:
    training = Training()
    for _text in DataLoader(Texts(), batch_size=2, collate_fn=" ".join, drop_last=drop_last):
        training.step((torch.randn(1, 8),))
    assert value(timeline, "samples") == samples


def test_tokens_are_the_elements_of_input_ids(timeline: Timeline) -> None:
    rows: Any = [{"labels": torch.zeros(1), "input_ids": torch.zeros(16)} for _ in range(6)]
    training = Training()
    for _batch in DataLoader(rows, batch_size=3):
        training.step((torch.randn(1, 8),))
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (6, 96)


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_samples_of_a_nested_tensor_are_its_components(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
    assert size_of([nested, torch.zeros(2)]) == (2, 0)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (IDS, (4, 0)),
        ((IDS, torch.zeros(4)), (4, 0)),
        ([torch.tensor(3.0), {"pixels": IDS}], (4, 0)),
        ({"name": "x", "pixels": IDS[:3]}, (3, 0)),
        (UserDict({"input_ids": IDS}), (4, 64)),
        (({"input_ids": IDS}, torch.zeros(4)), (4, 64)),
        ((packed(3, 5, 4), torch.zeros(3)), (3, 0)),
        (IDS.numpy(), (4, 0)),
        (Graphs(batch_size=5), (5, 0)),
        (Graphs(batch_size=torch.Size([6])), (6, 0)),
        (Graphs(num_graphs=7), (7, 0)),
    ],
)
def test_the_size_of_a_batch(batch: object, size: tuple[float, float]) -> None:
    assert size_of(batch) == size


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((IDS[:2], IDS), id="a pair of different leading dimensions"),
        pytest.param({"input_ids": IDS, "cu_seqlens": torch.zeros(9)}, id="packed by the script"),
        pytest.param([{"pixels": IDS}, {"pixels": IDS}], id="a list of dicts"),
        pytest.param([IDS, IDS], id="a list of tensors of one shape"),
        pytest.param([IDS[:2], IDS], id="a ragged list"),
        pytest.param({"input_ids": [[1, 2], [3]]}, id="a dict of lists"),
        pytest.param(Graphs(x=IDS), id="an object"),
        pytest.param(Failing(), id="an object that raises"),
        pytest.param(list(range(1000)), id="a long list"),
        pytest.param("text", id="a text"),
        pytest.param(torch.tensor(1.0), id="a number"),
        pytest.param([], id="nothing"),
    ],
)
def test_the_samples_of_an_ambiguous_batch_are_unknown(batch: object) -> None:
    assert size_of(batch).samples is None


def zipped(rows: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*rows, strict=True))


def flattened(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.cat(rows)[None], "cu_seqlens": torch.zeros(len(rows) + 1)}


Rows = list[Any]
COLLATES: dict[str, tuple[Rows, Any]] = {
    "pairs as a zip": ([(torch.zeros(3, 4, 4), {"boxes": torch.zeros(5, 4)})] * 22, zipped),
    "dicts": ([{"image": torch.zeros(3, 4, 4), "height": 4}] * 22, list),
    "a dict of lists": ([{"image": torch.zeros(3, 4, 4)}] * 22, lambda rows: {"image": [row["image"] for row in rows]}),
    "ragged": ([torch.zeros(10 + number) for number in range(22)], list),
    "packed": ([torch.zeros(10 + number % 3, 4) for number in range(22)], lambda rows: packed(*map(len, rows))),
    "flattened": ([torch.zeros(7)] * 22, flattened),
    "an object": ([torch.zeros(4)] * 22, lambda rows: Graphs(x=torch.stack(rows))),
    "an object that raises": ([torch.zeros(4)] * 22, lambda _rows: Failing()),
    "a text": (["a"] * 22, " ".join),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", COLLATES)
def test_a_loader_counts_the_samples_that_it_requests_whatever_the_batch_is(
    timeline: Timeline, collate: str, workers: int
) -> None:
    rows, function = COLLATES[collate]
    training = Training()
    for _batch in DataLoader(rows, batch_size=4, collate_fn=function, num_workers=workers):  # type: ignore[arg-type]
        training.step((torch.randn(1, 8),))
    assert value(timeline, "samples") == 22


def test_a_sampler_of_batches_of_indices_counts_their_samples(timeline: Timeline) -> None:
    training, dataset = Training(), TensorDataset(torch.randn(22, 8))
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=4, drop_last=False)
    for batch in DataLoader(dataset, sampler=sampler, batch_size=None):
        training.step(batch)
    assert value(timeline, "samples") == 22


@pytest.mark.parametrize("key", ["a text", (1, 2)])
def test_an_index_that_is_a_key_of_the_dataset_is_not_a_list_of_samples(timeline: Timeline, key: Any) -> None:
    training = Training()
    dataset: Any = {key: torch.randn(3, 8)}
    for batch in DataLoader(dataset, sampler=[key], batch_size=None):
        training.step((batch,))
    assert value(timeline, "samples") == 3


def test_one_used_batch_of_unknown_size_leaves_the_samples_absent(timeline: Timeline) -> None:
    training = Training()
    for batch in rankscope.timed([torch.randn(4, 8), "unknown", torch.randn(4, 8)]):
        training.step((batch if isinstance(batch, torch.Tensor) else torch.randn(1, 8),))
    assert value(timeline, "samples") == 0


def test_a_batch_that_the_script_collates_to_none_is_not_the_end_of_its_loader(timeline: Timeline, loader: Any) -> None:
    training = Training()
    rows: Any = list(torch.randn(12, 8))
    keep = iter([True, False, True])
    for batch in DataLoader(rows, batch_size=4, collate_fn=lambda rows: torch.stack(rows) if next(keep) else None):
        if batch is not None:
            training.step((batch,))
    assert value(timeline, "samples") == 8


def test_skipped_batches_do_not_count(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for number, batch in enumerate(loader):
        if number >= 3:
            training.step(batch)
    assert value(timeline, "samples") == 4 + 4 + 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_a_backward_pass_does_not_count(timeline: Timeline, workers: int) -> None:
    training = Training()
    data = TensorDataset(torch.randn(12, 8))
    loader = DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=bool(workers))
    sample = next(iter(loader))
    training.model(sample[0])
    for batch in loader:
        training.step(batch)
    assert value(timeline, "samples") == 12


def test_a_loop_with_a_break_leaves_no_batch_behind(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for _epoch in range(3):
        for number, batch in enumerate(loader):
            if number == 2:
                break
            training.step(batch)
    assert value(timeline, "samples") == 3 * 8


def test_an_evaluation_with_a_break_does_not_count(timeline: Timeline, loader: Any) -> None:
    training, evaluation = Training(), DataLoader(TensorDataset(torch.randn(30, 8)), batch_size=3)
    for batch in loader:
        for number, inputs in enumerate(evaluation):
            training.model(inputs[0])
            if number == 2:
                break
        training.step(batch)
    assert value(timeline, "samples") == 22


def test_batches_fetched_in_evaluation_mode_do_not_count(timeline: Timeline, loader: Any) -> None:
    training = Training()
    evaluation = itertools.cycle(DataLoader(TensorDataset(torch.randn(30, 8)), batch_size=3))
    for number, batch in enumerate(loader):
        if number >= 4:  # the hook has found the model
            training.model.eval()
            for inputs in itertools.islice(evaluation, 2):
                with torch.no_grad():
                    training.model(inputs[0])
            training.model.train()
        training.step(batch)
    assert value(timeline, "samples") == 22


def test_an_evaluation_between_a_steps_batch_and_its_end_does_not_count(timeline: Timeline, loader: Any) -> None:
    training, evaluations = Training(), []
    for number, batch in enumerate(loader):
        if number == 4:  # after steps that each used one batch of the only loader
            evaluations.append(iter(DataLoader(TensorDataset(torch.randn(30, 8)), batch_size=3)))
            training.model.eval()
            training.model(next(evaluations[0])[0])
            training.model.train()
        training.step(batch)
    assert value(timeline, "samples") == 22


@pytest.mark.parametrize("used", [[1, 1, 1, 2, 1], [1, 1, 3, 1], [2, 1, 1, 2], [1, 5]])
def test_steps_that_use_a_changing_number_of_batches_count_them_all(
    timeline: Timeline, loader: Any, used: list[int]
) -> None:
    training, batches, seen = Training(), iter(loader), 0
    for count in used:
        for batch in itertools.islice(batches, count):
            training.backward(batch)
            seen += len(batch[0])
        training.optimizer.step()
        assert value(timeline, "samples") == seen
    assert seen == 22


def test_a_second_loader_counts_from_the_step_that_uses_it(timeline: Timeline, loader: Any) -> None:
    training, second = Training(), None
    for number, batch in enumerate(loader):
        training.backward(batch)
        if number >= 3:
            second = second or iter(DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=3))
            training.backward(next(second))
        training.optimizer.step()
    assert value(timeline, "samples") == 22 + 3 * 3


def test_batches_skipped_after_normal_steps_do_not_count(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for number, batch in enumerate(loader):
        if number not in (2, 3):
            training.step(batch)
    assert value(timeline, "samples") == 22 - 2 * 4


def test_batches_without_gradients_between_steps_do_not_count(timeline: Timeline, loader: Any) -> None:
    training, batches = Training(), iter(loader)
    for number in range(5):
        if number == 3:
            with torch.no_grad():
                training.model(next(batches)[0])
        training.step(next(batches))
    assert value(timeline, "samples") == 22 - 4


def test_a_loader_that_the_dataset_reads_for_each_batch_does_not_count(timeline: Timeline) -> None:
    class Joined(list[int]):
        def __getitem__(self, index: Any) -> torch.Tensor:
            (rows,) = next(iter(DataLoader(TensorDataset(torch.randn(3, 8)), batch_size=3)))
            return torch.as_tensor(rows.mean(0))

    training = Training()
    for batch in DataLoader(Joined(range(10)), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)]):  # type: ignore[arg-type]
        training.step(batch)
    assert value(timeline, "samples") == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raises_leaves_the_others_counted(timeline: Timeline, workers: int) -> None:
    class Damaged(list[int]):
        def __getitem__(self, index: Any) -> torch.Tensor:
            if index == 9:
                raise ValueError("user error")
            return torch.randn(8)

    training, loader = Training(), DataLoader(Damaged(range(18)), batch_size=4, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    for number in range(5):
        if number == 2:
            with pytest.raises(ValueError, match="user error"):
                next(batches)
        else:
            training.step([next(batches)])
    assert value(timeline, "samples") == 18 - 4


def test_tokens_count_in_the_batches_of_a_loader_that_have_some(timeline: Timeline) -> None:
    rows: Any = [
        {"input_ids": torch.zeros(16)} if number // 4 % 2 else {"pixels": torch.zeros(8)} for number in range(24)
    ]
    training = Training()

    def collate(rows: list[dict[str, torch.Tensor]]) -> list[Any]:
        (name,) = rows[0]
        stacked = torch.stack([row[name] for row in rows])
        return [{name: stacked}] if name == "input_ids" else [stacked]

    for _batch in DataLoader(rows, batch_size=4, collate_fn=collate):
        training.step((torch.randn(1, 8),))
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (24, 12 * 16)


def test_a_stream_counts_the_samples_of_every_step(timeline: Timeline) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.randn(22, 8))

    training = Training()
    for batch in DataLoader(Stream(), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)]):
        training.step(batch)
    assert value(timeline, "samples") == 22


def test_a_batch_fetched_before_the_return_to_training_mode_counts(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for batch in loader:
        training.model.train()
        training.step(batch)
        training.model.eval()
    assert value(timeline, "samples") == 22


@pytest.mark.parametrize("accumulated", [1, 2])
def test_prefetched_batches_count_once_each(timeline: Timeline, loader: Any, accumulated: int) -> None:
    def ahead() -> Iterator[Any]:
        batches = iter(loader)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current

    training = Training()
    for number, batch in enumerate(ahead()):
        training.backward(batch)
        if number % accumulated == accumulated - 1:
            training.optimizer.step()
    assert value(timeline, "samples") == 22


def test_an_epoch_of_one_batch_counts_although_it_ends_before_the_step(timeline: Timeline) -> None:
    training, loader = Training(), DataLoader(TensorDataset(torch.randn(5, 8)), batch_size=8)
    for _epoch in range(3):
        (batch,) = loader
        training.step(batch)
    assert value(timeline, "samples") == 15


def test_batches_that_fill_a_cache_do_not_count(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for batch in list(loader):
        training.step(batch)
    assert value(timeline, "samples") == 0


def test_a_new_iterator_for_each_step_counts_its_one_batch(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for _step in range(5):
        training.step(next(iter(loader)))
    assert value(timeline, "samples") == 20


def test_accumulation_continues_over_the_end_of_an_epoch(timeline: Timeline) -> None:
    training, loader, count = Training(), DataLoader(TensorDataset(torch.randn(3, 8)), batch_size=1), 0
    for _epoch in range(4):
        for batch in loader:
            training.backward(batch)
            count += 1
            if count % 4 == 0:
                training.optimizer.step()
    assert value(timeline, "samples") == 12


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


def test_the_script_gets_an_error_of_its_iterable(timeline: Timeline) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("user error")

    batches = rankscope.timed(failing())
    assert next(batches) == 1
    with pytest.raises(ZeroDivisionError, match="user error"):
        next(batches)


def test_the_scripts_numbers_of_a_step_count(timeline: Timeline, loader: Any) -> None:
    rankscope.step()
    for batch in loader:
        Training().step(batch)
        rankscope.step(samples=100, tokens=2000)
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (600, 12000)


def test_the_scripts_numbers_count_from_the_first_step_that_has_them(timeline: Timeline, loader: Any) -> None:
    training = Training()
    for number, batch in enumerate(loader):
        training.backward(batch)
        training.optimizer.step()
        if number >= 3:
            rankscope.step(samples=100)
    assert value(timeline, "samples") == 4 * 4 + 3 * 100


def test_a_step_may_have_only_tokens(timeline: Timeline) -> None:
    rankscope.step(tokens=5)
    assert (value(timeline, "samples"), value(timeline, "tokens")) == (0, 5)


def test_the_start_of_a_loader_is_data_wait(timeline: Timeline) -> None:
    class SlowStart(list[int]):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.05)
            return super().__iter__()

    Training().step(torch.randn(1, 1, 8))
    iter(DataLoader(TensorDataset(torch.randn(4, 8)), sampler=SlowStart(range(4)), batch_size=None))
    assert timeline.writer.slots[INDEX["phase_seconds"] + layout.DATA_WAIT] >= 0.05
