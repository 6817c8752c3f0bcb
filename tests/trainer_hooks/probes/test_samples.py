"""The samples and tokens of the batches that were trained on, and of no others."""

from __future__ import annotations

import itertools
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from testing.own_record import snapshot
from tests.trainer_hooks.probes.batches import Failing, Graphs, Training, evaluation, loader, packed
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import rankscope
from rankscope.timeline.timeline import Timeline

OTHER = (torch.randn(1, 8),)
"""A batch to train on instead of the loader's."""
Rows = list[Any]


def stacked(rows: Rows) -> list[torch.Tensor]:
    return [torch.stack(rows)]


class Stream(IterableDataset[Any]):
    """A data set without an index."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def batches_by_index() -> DataLoader[Any]:
    dataset = TensorDataset(torch.randn(22, 8))
    return DataLoader(dataset, sampler=BatchSampler(SequentialSampler(dataset), 4, drop_last=False), batch_size=None)


BATCHES: dict[str, tuple[Callable[[], Iterable[Any]], int]] = {
    "of a loader with workers": (lambda: loader(12, num_workers=1), 12),
    "of a stream of batches": (lambda: DataLoader(Stream([(torch.randn(5, 8),), (torch.randn(3, 8),)]), None), 8),
    "of a stream of rows": (lambda: DataLoader(Stream(torch.randn(22, 8)), 4, collate_fn=stacked), 22),
    "of a sampler of batches": (batches_by_index, 22),
    "of a loader in timed": (lambda: rankscope.timed(loader()), 22),
    "of a cache that a loader has filled": (lambda: list(loader()), 0),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_samples_of_the_batches_count(training: Training, kind: str) -> None:
    batches, samples = BATCHES[kind]
    training.train(batches())
    assert training.samples == samples


def test_the_ring_has_the_samples_of_each_step(training: Training, timeline: Timeline) -> None:
    training.train(loader())
    entry = timeline.writer.ring[3].tolist()
    assert entry[0] == 3
    assert entry[2] == 12


def test_batches_of_several_epochs_and_loaders_add_up(training: Training) -> None:
    first, second = loader(), loader(12, 2)
    for _ in range(2):
        for batch, extra in zip(first, second, strict=True):
            training.step(batch)
            training.backward(extra)
    assert training.samples == 2 * (22 + 12)


def test_micro_batches_fetched_before_the_first_backward_all_count(training: Training) -> None:
    batches = iter(loader())
    for _ in range(3):
        for batch in [next(batches), next(batches)]:
            training.backward(batch)
        training.optimizer.step()
    assert training.samples == 22


@pytest.mark.parametrize("kind", ["phase", "no_grad", "plain"])
def test_an_evaluations_batches_do_not_count(training: Training, kind: str) -> None:
    held_out = evaluation()
    for number, batch in enumerate(loader()):
        if number % 3 == 0:
            context: Any = {"phase": rankscope.phase("evaluation"), "no_grad": torch.no_grad()}.get(kind, nullcontext())
            with context:
                for inputs in held_out:
                    training.model(inputs[0])
        training.step(batch)
    for inputs in held_out:  # after the last step
        training.model(inputs[0])
    assert training.samples == 22


@pytest.mark.parametrize(("drop_last", "samples"), [(True, 4), (False, 0)])
def test_texts_of_a_stream_count_if_every_batch_is_full(training: Training, drop_last: bool, samples: int) -> None:
    training.train(DataLoader(Stream("abcde"), batch_size=2, collate_fn=" ".join, drop_last=drop_last), on=OTHER)
    assert training.samples == samples


def test_tokens_are_the_elements_of_input_ids(training: Training) -> None:
    rows: Any = [{"labels": torch.zeros(1), "input_ids": torch.zeros(16)} for _ in range(6)]
    training.train(DataLoader(rows, batch_size=3), on=OTHER)
    assert (training.samples, training.tokens) == (6, 96)


def zipped(rows: Rows) -> tuple[Any, ...]:
    return tuple(zip(*rows, strict=True))


class FailingMapping(UserDict[str, Any]):
    def __init__(self, _rows: Rows) -> None:
        super().__init__()

    def __contains__(self, key: object) -> bool:
        raise RuntimeError("user error")


def endless(_rows: Rows) -> Rows:
    batch: Rows = []
    batch.append(batch)
    return batch


def flattened(rows: Rows) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.cat(rows)[None], "cu_seqlens": torch.zeros(len(rows) + 1)}


def with_images(rows: Rows) -> dict[str, Rows]:
    return {"image": [row["image"] for row in rows]}


def packed_rows(rows: Rows) -> Any:
    return packed(*map(len, rows))


def graphs(rows: Rows) -> Graphs:
    return Graphs(x=torch.stack(rows))


def failing(_rows: Rows) -> Failing:
    return Failing()


COLLATES: dict[str, tuple[Rows, Any]] = {
    "pairs as a zip": ([(torch.zeros(3, 4, 4), {"boxes": torch.zeros(5, 4)})] * 22, zipped),
    "dicts": ([{"image": torch.zeros(3, 4, 4), "height": 4}] * 22, list),
    "a dict of lists": ([{"image": torch.zeros(3, 4, 4)}] * 22, with_images),
    "ragged": ([torch.zeros(10 + number) for number in range(22)], list),
    "packed": ([torch.zeros(10 + number % 3, 4) for number in range(22)], packed_rows),
    "flattened": ([torch.zeros(7)] * 22, flattened),
    "an object": ([torch.zeros(4)] * 22, graphs),
    "an object that raises": ([torch.zeros(4)] * 22, failing),
    "a text": (["a"] * 22, " ".join),
    "a mapping that raises": ([torch.zeros(4)] * 22, FailingMapping),
    "a list that contains itself": ([torch.zeros(4)] * 22, endless),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", COLLATES)
def test_a_loader_counts_the_samples_that_it_requests_whatever_the_batch_is(
    training: Training, collate: str, workers: int
) -> None:
    rows: tuple[Any, Any] = COLLATES[collate]
    training.train(DataLoader(rows[0], batch_size=4, collate_fn=rows[1], num_workers=workers), on=OTHER)
    assert training.samples == 22


@pytest.mark.parametrize("key", ["a text", (1, 2)])
def test_an_index_that_is_a_key_of_the_dataset_is_not_a_list_of_samples(training: Training, key: Any) -> None:
    dataset: Any = {key: torch.randn(3, 8)}
    for batch in DataLoader(dataset, sampler=[key], batch_size=None):
        training.step((batch,))
    assert training.samples == 3


def test_one_used_batch_of_unknown_size_leaves_the_samples_absent(training: Training) -> None:
    for batch in rankscope.timed([torch.randn(4, 8), "unknown", torch.randn(4, 8)]):
        training.step((batch,) if isinstance(batch, torch.Tensor) else OTHER)
    assert training.samples == 0


def test_a_batch_that_the_script_collates_to_none_is_not_the_end_of_its_loader(training: Training) -> None:
    rows: Any = list(torch.randn(12, 8))
    keep = iter([True, False, True])
    for batch in DataLoader(rows, batch_size=4, collate_fn=lambda rows: torch.stack(rows) if next(keep) else None):
        if batch is not None:
            training.step((batch,))
    assert training.samples == 8


@pytest.mark.parametrize("skipped", [(0, 1, 2), (2, 3)], ids=["first", "after normal steps"])
def test_skipped_batches_do_not_count(training: Training, skipped: tuple[int, ...]) -> None:
    for number, batch in enumerate(loader()):
        if number not in skipped:
            training.step(batch)
    assert training.samples == 22 - 4 * len(skipped)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_a_backward_pass_does_not_count(training: Training, workers: int) -> None:
    batches = loader(12, num_workers=workers, persistent_workers=bool(workers))
    training.model(next(iter(batches))[0])
    training.train(batches)
    assert training.samples == 12


def test_a_loop_with_a_break_leaves_no_batch_behind(training: Training) -> None:
    batches = loader()
    for _epoch in range(3):
        for number, batch in enumerate(batches):
            if number == 2:
                break
            training.step(batch)
    assert training.samples == 3 * 8


def test_an_evaluation_with_a_break_does_not_count(training: Training) -> None:
    held_out = evaluation()
    for batch in loader():
        for number, inputs in enumerate(held_out):
            training.model(inputs[0])
            if number == 2:
                break
        training.step(batch)
    assert training.samples == 22


def test_batches_fetched_in_evaluation_mode_do_not_count(training: Training) -> None:
    held_out = itertools.cycle(evaluation())
    for number, batch in enumerate(loader()):
        if number >= 4:  # the hook has found the model
            training.model.eval()
            for inputs in itertools.islice(held_out, 2):
                with torch.no_grad():
                    training.model(inputs[0])
            training.model.train()
        training.step(batch)
    assert training.samples == 22


def test_an_evaluation_between_a_steps_batch_and_its_end_does_not_count(training: Training) -> None:
    evaluations = []
    for number, batch in enumerate(loader()):
        if number == 4:  # after steps that each used one batch of the only loader
            evaluations.append(iter(evaluation()))
            training.model.eval()
            training.model(next(evaluations[0])[0])
            training.model.train()
        training.step(batch)
    assert training.samples == 22


@pytest.mark.parametrize("used", [[1, 1, 1, 2, 1], [1, 1, 3, 1], [2, 1, 1, 2], [1, 5]])
def test_steps_that_use_a_changing_number_of_batches_count_them_all(training: Training, used: list[int]) -> None:
    batches, seen = iter(loader()), 0
    for count in used:
        for batch in itertools.islice(batches, count):
            training.backward(batch)
            seen += len(batch[0])
        training.optimizer.step()
        assert training.samples == seen
    assert seen == 22


def test_a_second_loader_counts_from_the_step_that_uses_it(training: Training) -> None:
    second = None
    for number, batch in enumerate(loader()):
        training.backward(batch)
        if number >= 3:
            second = second or iter(loader(12, 3))
            training.backward(next(second))
        training.optimizer.step()
    assert training.samples == 22 + 3 * 3


def test_batches_without_gradients_between_steps_do_not_count(training: Training) -> None:
    batches = iter(loader())
    for number in range(5):
        if number == 3:
            with torch.no_grad():
                training.model(next(batches)[0])
        training.step(next(batches))
    assert training.samples == 22 - 4


def test_a_loader_that_the_dataset_reads_for_each_batch_does_not_count(training: Training) -> None:
    class Joined:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: Any) -> torch.Tensor:
            (rows,) = next(iter(loader(3, 3)))
            return torch.as_tensor(rows.mean(0))

    dataset: Any = Joined()
    training.train(DataLoader(dataset, batch_size=4, collate_fn=stacked))
    assert training.samples == 10


class Damaged:
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise ValueError("user error")
        return torch.randn(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raises_leaves_the_others_counted(training: Training, workers: int) -> None:
    dataset: Any = Damaged()
    batches = iter(DataLoader(dataset, batch_size=4, num_workers=workers))
    for number in range(5):
        if number == 2:
            with pytest.raises(ValueError, match="user error"):
                next(batches)
        else:
            training.step([next(batches)])
    assert training.samples == 18 - 4


def test_tokens_count_in_the_batches_of_a_loader_that_have_some(training: Training) -> None:
    def collate(rows: list[dict[str, torch.Tensor]]) -> Any:
        (name,) = rows[0]
        batch = torch.stack([row[name] for row in rows])
        return [{name: batch}] if name == "input_ids" else [batch]

    kinds = {"pixels": torch.zeros(8)}, {"input_ids": torch.zeros(16)}
    rows: Any = [kinds[number // 4 % 2] for number in range(24)]
    training.train(DataLoader(rows, batch_size=4, collate_fn=collate), on=OTHER)
    assert (training.samples, training.tokens) == (24, 12 * 16)


def test_a_batch_fetched_before_the_return_to_training_mode_counts(training: Training) -> None:
    for batch in loader():
        training.model.train()
        training.step(batch)
        training.model.eval()
    assert training.samples == 22


def add_gradients(training: Training, batch: Any) -> None:
    parameters = list(training.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(training.loss(batch), parameters), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def run_engine(training: Training, batch: Any) -> None:
    """Run backward as Megatron's schedules do, which no probe sees."""
    loss = training.loss(batch)
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@pytest.mark.parametrize("differentiate", [add_gradients, Training.backward], ids=["grad", "backward"])
@pytest.mark.parametrize("accumulated", [1, 2, 3, 6])
def test_gradients_accumulated_by_grad_count_like_those_of_backward(
    training: Training, differentiate: Callable[[Training, Any], None], accumulated: int
) -> None:
    for _epoch in range(2):
        for number, batch in enumerate(loader()):
            differentiate(training, batch)
            if number % accumulated == accumulated - 1:
                training.optimizer.step()
    assert training.samples == 44


def test_gradients_accumulated_by_grad_over_the_end_of_an_epoch_are_not_guessed(training: Training) -> None:
    for number, batch in enumerate(itertools.chain(*(loader(3, 1) for _ in range(4)))):
        add_gradients(training, batch)
        if number % 4 == 3:
            training.optimizer.step()
    assert training.samples == 0


def test_passes_that_no_probe_sees_leave_accumulated_batches_uncounted(training: Training) -> None:
    for number, batch in enumerate(loader(80)):
        run_engine(training, batch)
        if number % 2:
            training.optimizer.step()
    assert training.samples == 0


@pytest.mark.parametrize("kind", ["losses", "inputs"])
def test_several_batches_for_one_backward_pass_are_never_counted_as_one(training: Training, kind: str) -> None:
    batches, seen = iter(loader(200)), set()
    while pair := list(itertools.islice(batches, 2)):
        if kind == "losses":
            sum(map(training.loss, pair)).backward()  # type: ignore[union-attr]
            training.optimizer.step()
        else:
            training.step([torch.cat([inputs for (inputs,) in pair])])
        seen.add(training.samples)
    assert seen == {0}


def test_a_changing_number_of_losses_for_one_backward_pass_leaves_the_samples_absent(training: Training) -> None:
    batches = iter(loader())
    for count in (1, 1, 3, 1):
        losses = [training.loss(batch) for batch in itertools.islice(batches, count)]
        sum(losses).backward()  # type: ignore[union-attr]
        training.optimizer.step()
    assert training.samples == 0


def test_a_batch_dropped_for_its_loss_leaves_the_samples_absent(training: Training) -> None:
    for number, batch in enumerate(loader()):
        loss = training.loss(batch)
        if number != 3:
            loss.backward()
            training.optimizer.step()
    assert training.samples == 0


@pytest.mark.parametrize("skipped", [2, 3])
def test_a_loop_that_skips_most_batches_has_no_samples(training: Training, skipped: int) -> None:
    for number, batch in enumerate(loader(200)):
        if number % skipped == 0:
            training.step(batch)
    assert training.samples == 0


def test_skipped_batches_at_the_start_count_neither_before_nor_after_the_next_step(training: Training) -> None:
    seen = []
    for number, batch in enumerate(loader()):
        if number >= 3:
            training.step(batch)
            seen.append(training.samples)
    assert seen == [0, 8, 10]


def repeated(times: int, batches: int) -> list[list[int]]:
    """Return lists of four indices, each several times in succession."""
    lists = [[*range(first, first + 4)] for first in range(0, 4 * batches, 4)]
    return [index for index in lists for _ in range(times)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_that_is_fetched_again_for_each_of_its_parts_is_not_counted(
    training: Training, workers: int, parts: int, accumulated: int
) -> None:
    sampler = repeated(parts, 22)
    dataset = TensorDataset(torch.randn(88, 8))
    for number, (inputs,) in enumerate(DataLoader(dataset, batch_sampler=sampler, num_workers=workers)):
        training.backward([inputs.chunk(parts)[number % parts]])
        if number % accumulated == accumulated - 1:
            training.optimizer.step()
    assert (training.samples, training.tokens) == (0, 0)
    assert snapshot().info["settings"]["batch_size"] == ""


@pytest.mark.parametrize("index", [500, "text", numpy.int64(500)], ids=["int", "text", "numpy"])
def test_indices_are_compared_by_value(training: Training, index: Any) -> None:
    def copy(number: int) -> Any:
        return type(index)(f"{index}{number}")

    dataset: Any = {copy(number): torch.randn(8) for number in range(4)}
    sampler = [[copy(number // 2 * 2), copy(number // 2 * 2 + 1)] for number in range(4)]
    training.train(DataLoader(dataset, batch_sampler=sampler))
    assert training.samples == 0


class Key:
    """An index of the script, which raises if it is compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("user error")

    def __hash__(self) -> int:
        return id(self)


class ByKey:
    def __getitem__(self, _key: Key) -> torch.Tensor:
        return torch.randn(8)


@pytest.mark.parametrize(("keys", "samples"), [(8, 16), (2, 0)], ids=["new", "repeated"])
def test_indices_of_the_scripts_types_are_compared_by_identity(training: Training, keys: int, samples: int) -> None:
    known, dataset = [Key() for _ in range(keys)], ByKey()
    sampler = [[known[number % keys], known[(number + 1) % keys]] for number in range(0, 16, 2)]
    training.train(DataLoader(dataset, batch_sampler=sampler, collate_fn=stacked))  # type: ignore[arg-type]
    assert training.samples == samples


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["new", "persistent"])
def test_the_same_batch_in_each_epoch_counts(training: Training, options: dict[str, Any]) -> None:
    batches = loader(4, 4, **options)
    for _epoch in range(5):
        training.train(batches)
    assert training.samples == 20


def test_a_sample_that_is_drawn_twice_in_succession_counts(training: Training) -> None:
    training.train(DataLoader(TensorDataset(torch.randn(4, 8)), batch_size=1, sampler=[0, 1, 1, 2, 3, 3, 3]))
    assert training.samples == 7


def in_threads(tasks: Iterable[Callable[[], object]]) -> None:
    """Run each task on a thread of its own, one after the other."""
    for task in tasks:
        thread = threading.Thread(target=task)
        thread.start()
        thread.join()


# Not forked: a thread's fork may crash in this process, where other tests have loaded gRPC and started threads.
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(("trained_before", "options"), [(0, {}), (12, {}), (12, SPAWNED)])
def test_the_first_batch_of_a_thread_that_trains_counts(
    training: Training, trained_before: int, options: dict[str, Any]
) -> None:
    training.train(loader(trained_before) if trained_before else ())
    in_threads([lambda: training.train(loader(**options))])
    assert training.samples == trained_before + 22


def test_each_batch_of_threads_that_train_one_after_the_other_counts(training: Training) -> None:
    batches = iter(loader())
    in_threads([lambda: training.step(next(batches))] * 6)
    assert training.samples == 22


def test_a_timed_loader_on_a_thread_that_trains_counts_once(training: Training) -> None:
    in_threads([lambda: training.train(rankscope.timed(loader()))])
    assert training.samples == 22


def test_batches_that_another_thread_fetches_for_the_training_are_not_guessed(training: Training) -> None:
    fetched: list[Any] = []
    in_threads([lambda: fetched.extend(loader())])
    training.train(fetched)
    assert training.samples == 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_prefetched_batches_count_once_each(training: Training, accumulated: int) -> None:
    def ahead() -> Iterator[Any]:
        batches = iter(loader())
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current

    for number, batch in enumerate(ahead()):
        training.backward(batch)
        if number % accumulated == accumulated - 1:
            training.optimizer.step()
    assert training.samples == 22


def test_an_epoch_of_one_batch_counts_although_it_ends_before_the_step(training: Training) -> None:
    batches = loader(5, 8)
    for _epoch in range(3):
        (batch,) = batches
        training.step(batch)
    assert training.samples == 15


def test_a_new_iterator_for_each_step_counts_its_one_batch(training: Training) -> None:
    batches = loader()
    for _step in range(5):
        training.step(next(iter(batches)))
    assert training.samples == 20


def test_accumulation_continues_over_the_end_of_an_epoch(training: Training) -> None:
    batches, count = loader(3, 1), 0
    for _epoch in range(4):
        for batch in batches:
            training.backward(batch)
            count += 1
            if count % 4 == 0:
                training.optimizer.step()
    assert training.samples == 12


def test_the_scripts_numbers_of_a_step_count(training: Training) -> None:
    rankscope.step()
    for batch in loader():
        training.step(batch)
        rankscope.step(samples=100, tokens=2000)
    assert (training.samples, training.tokens) == (600, 12000)


def test_the_scripts_numbers_count_from_the_first_step_that_has_them(training: Training) -> None:
    for number, batch in enumerate(loader()):
        training.step(batch)
        if number >= 3:
            rankscope.step(samples=100)
    assert training.samples == 4 * 4 + 3 * 100


def test_a_step_may_have_only_tokens(training: Training) -> None:
    rankscope.step(tokens=5)
    assert (training.samples, training.tokens) == (0, 5)
