"""A phase of the script belongs to the task that opened it, not to the thread on which other tasks run, too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import Context
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from testing.own_record import seconds, snapshot, value
from tests.trainer_hooks.probes.batches import Training, loader
from torch.utils.data import DataLoader, IterableDataset

import rankscope
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline


@pytest.fixture
def training(timeline: Timeline) -> Training:
    made = Training(timeline)
    made.train(loader(4))
    return made


async def train(training: Training, seen: list[str]) -> None:
    for batch in loader():
        training.step(batch)
        seen.append(snapshot().phase)
        await asyncio.sleep(0)


async def waiting(phase: str, event: asyncio.Event) -> None:
    with rankscope.phase(phase):
        await event.wait()


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", "data_wait", "forward", "upload"])
def test_a_task_that_waits_in_a_phase_does_not_absorb_the_training_of_another(training: Training, phase: str) -> None:
    seen: list[str] = []

    async def main() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(waiting(phase, event))
        await asyncio.sleep(0)
        before = seconds(training.timeline, layout.FORWARD)
        await train(training, seen)
        assert seconds(training.timeline, layout.FORWARD) > before
        event.set()
        await task

    asyncio.run(main())
    assert seen == ["other"] * 6
    assert training.samples == 4 + 22
    assert phase in snapshot().phase_seconds
    assert value(training.timeline, "checkpoints") == (phase == "checkpoint")
    assert training.timeline.open_phases == (layout.OTHER, None)
    assert training.timeline.usual_owner == threading.get_ident()


def test_a_phase_goes_on_when_its_task_does(training: Training) -> None:
    seen = []

    async def evaluate() -> None:
        with rankscope.phase("evaluation"):
            for batch in loader(8):
                training.model(batch[0])
                seen.append(snapshot().phase)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(evaluate(), train(training, seen))

    asyncio.run(main())
    assert seen == ["evaluation", "other"] * 2 + ["other"] * 4
    assert training.samples == 4 + 22


def test_a_phase_covers_the_tasks_that_are_started_inside_it(training: Training) -> None:
    async def evaluate() -> None:
        for batch in loader(8):
            training.model(batch[0])
            await asyncio.sleep(0)

    async def main() -> None:
        with rankscope.phase("evaluation"):
            await asyncio.gather(evaluate(), evaluate())
        await train(training, [])

    asyncio.run(main())
    assert training.samples == 4 + 22


def test_a_task_that_outlives_the_phase_it_was_started_in_trains(training: Training) -> None:
    seen: list[str] = []

    async def main() -> None:
        with rankscope.phase("evaluation"):
            task = asyncio.create_task(train(training, seen))
        await task

    asyncio.run(main())
    assert seen == ["other"] * 6
    assert training.samples == 4 + 22


def test_phases_of_two_tasks_may_end_in_any_order(training: Training) -> None:
    seen = []

    async def main() -> None:
        first = asyncio.Event()
        task = asyncio.create_task(waiting("first", first))
        await asyncio.sleep(0)
        with rankscope.phase("second"):
            first.set()
            await task
            seen.append(snapshot().phase)
            with rankscope.phase("third"):
                seen.append(snapshot().phase)
            seen.append(snapshot().phase)

    asyncio.run(main())
    assert seen == ["other", "third", "second"]
    assert training.timeline.open_phases == (layout.OTHER, None)


def test_a_cancelled_task_ends_its_phase(training: Training) -> None:
    async def main() -> None:
        task = asyncio.create_task(waiting("evaluation", asyncio.Event()))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        training.train(loader())

    asyncio.run(main())
    assert training.samples == 4 + 22
    assert training.timeline.tasks.open == set()


def test_a_phase_may_end_in_another_task(training: Training) -> None:
    async def batches() -> AsyncIterator[Any]:
        with rankscope.phase("evaluation"):
            yield 1

    async def main() -> None:
        generator = batches()
        await generator.__anext__()
        await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
        training.train(loader())

    asyncio.run(main())
    assert training.samples == 4 + 22


@pytest.mark.parametrize(
    "run", [asyncio.to_thread, lambda task: asyncio.get_running_loop().run_in_executor(None, task)]
)
def test_training_on_threads_of_an_executor_goes_on_while_a_task_waits_in_a_phase(
    timeline: Timeline, run: Callable[[Callable[[], object]], Any]
) -> None:
    training = Training(timeline)

    async def main() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(waiting("evaluation", event))
        await asyncio.sleep(0)
        for batch in loader():
            await run(partial(training.step, batch))
        event.set()
        await task

    asyncio.run(main())
    assert value(timeline, "steps") == 6


def test_a_phase_within_a_forward_pass_of_a_notebook_ends_before_it(training: Training) -> None:
    class Model(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with rankscope.phase("attention"):
                return super().forward(inputs)

    training.model = Model(8, 2)

    async def cell() -> None:
        training.train(loader())

    asyncio.run(cell())
    assert training.samples == 4 + 22
    assert "attention" in snapshot().phase_seconds
    assert training.timeline.open_phases == (layout.OTHER, None)


def test_each_greenlet_has_phases_of_its_own(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the context as the package greenlet does."""
    monkeypatch.setitem(sys.modules, "greenlet", ModuleType("greenlet"))
    evaluation, greenlet = rankscope.phase("evaluation"), Context()
    greenlet.run(evaluation.__enter__)
    training.train(loader())
    greenlet.run(evaluation.__exit__, None, None, None)
    assert training.samples == 4 + 22


def batches_in_a_phase(phase: str, seen: list[str]) -> Iterator[Any]:
    for batch in loader():
        with rankscope.phase(phase):
            yield batch
            with rankscope.phase("inner"):
                seen.append(snapshot().phase)
            seen.append(snapshot().phase)


@pytest.mark.parametrize("phase", ["evaluation", "data_wait", "upload"])
def test_a_generator_that_yields_in_a_phase_does_not_absorb_the_training(training: Training, phase: str) -> None:
    resumed: list[str] = []
    seen = []
    before = seconds(training.timeline, layout.FORWARD)
    for batch in batches_in_a_phase(phase, resumed):
        training.step(batch)
        seen.append(snapshot().phase)
        with rankscope.phase("log"):
            seen.append(snapshot().phase)
    assert seen == ["other", "log"] * 6
    assert resumed == ["evaluation" if phase == "evaluation" else "inner", phase] * 6
    assert seconds(training.timeline, layout.FORWARD) > before
    assert training.samples == 4 + 22
    assert training.timeline.open_phases == (layout.OTHER, None)
    assert training.timeline.usual_owner == threading.get_ident()


def test_a_generator_that_is_left_ends_its_phase(training: Training) -> None:
    generator = batches_in_a_phase("evaluation", [])
    training.step(next(generator))
    del generator
    assert training.timeline.tasks.open == set()
    training.train(loader())
    assert training.samples == 4 + 4 + 22


def test_a_phase_of_a_dataset_lasts_until_its_sample_is_returned(training: Training) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for row in torch.randn(22, 8):
                with rankscope.phase("tokenize"):
                    yield row

    training.train(DataLoader(Stream(), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)]))
    assert training.samples == 4 + 22
    assert training.timeline.open_phases == (layout.OTHER, None)
    assert "tokenize" in snapshot().phase_seconds


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    with rankscope.phase("evaluation"):
        yield


def test_a_phase_in_a_context_manager_lasts_as_long_as_its_body(training: Training) -> None:
    with evaluation():
        training.model(next(iter(loader()))[0])
        assert snapshot().phase == "evaluation"
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation())
        stack.enter_context(rankscope.phase("upload"))
        for _ in loader():
            assert snapshot().phase == "evaluation"
    training.train(loader())
    assert training.samples == 4 + 22


def test_a_phase_in_an_asynchronous_context_manager_lasts_as_long_as_its_body(training: Training) -> None:
    @contextlib.asynccontextmanager
    async def evaluation() -> AsyncIterator[None]:
        with rankscope.phase("evaluation"):
            yield

    async def main() -> None:
        async with evaluation():
            await asyncio.sleep(0)
            for _ in loader():
                assert snapshot().phase == "evaluation"

    asyncio.run(main())
    assert training.samples == 4


@pytest.fixture
def in_a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_unwinding_forgets_the_phases_of_all_tasks(training: Training, in_a_loop: asyncio.AbstractEventLoop) -> None:
    async def main() -> None:
        with rankscope.phase("evaluation"):
            training.timeline.unwind()

    in_a_loop.run_until_complete(main())
    training.train(loader())
    assert training.samples == 4 + 22
