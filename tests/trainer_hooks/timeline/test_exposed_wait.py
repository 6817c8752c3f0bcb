"""The end of the exposed wait of DDP's all-reduce: with the backward pass, or by a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from testing.own_record import installed
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from rankscope.probes import backward, ddp
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

ALL_REDUCE = layout.OPS.index("ddp_all_reduce")

Forward = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline(RankWriter())
    timeline.step()  # ends startup
    return timeline


@pytest.fixture(params=["backward is seen", "backward is not seen"])
def probes(request: pytest.FixtureRequest) -> tuple[ModuleType, ...]:
    return (ddp, backward) if request.param == "backward is seen" else (ddp,)


@pytest.fixture(autouse=True)
def watched(process_group: None, timeline: Timeline, probes: tuple[ModuleType, ...]) -> Iterator[None]:
    with installed(timeline, *probes):
        yield


@pytest.fixture
def model(watched: None) -> torch.nn.Module:
    return DistributedDataParallel(torch.nn.Linear(2, 2))


def found(timeline: Timeline) -> tuple[float, float, bool]:
    """Return the all-reduces, the open collective in the record, and whether their wait is all of the phase's time."""
    slots = timeline.writer.slots
    seconds = slots[INDEX["collective_seconds"] + ALL_REDUCE]
    in_phase = slots[INDEX["phase_seconds"] + layout.COLLECTIVE_WAIT]
    calls = slots[INDEX["collectives"] + ALL_REDUCE]
    return calls, slots[INDEX["collective_op"]], in_phase == pytest.approx(seconds) and seconds > 0


def test_each_backward_pass_has_one_wait(timeline: Timeline, model: torch.nn.Module) -> None:
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        assert timeline.open_phases == (layout.OTHER, None)
    assert found(timeline) == (3, 0, True)


class TrainsByMethod(DistributedDataParallel):
    """A subclass that prepares the reducer in its own method and never calls DDP's forward."""

    def train_step(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(inputs)
        self.reducer.prepare_for_backward([outputs] if self.find_unused_parameters else [])
        return outputs


class PreparesLate(DistributedDataParallel):
    """A subclass that prepares the reducer after a forward pass under `no_sync`, like a pipeline stage."""

    def train_step(self, inputs: torch.Tensor) -> torch.Tensor:
        with self.no_sync():
            outputs: torch.Tensor = self(inputs)
        self.reducer.prepare_for_backward([outputs] if self.find_unused_parameters else [])
        return outputs


def composable(**options: Any) -> Forward:
    return replicate(torch.nn.Linear(2, 2), **options)


def by_method(**options: Any) -> Forward:
    return TrainsByMethod(torch.nn.Linear(2, 2), **options).train_step


def prepared_late(**options: Any) -> Forward:
    return PreparesLate(torch.nn.Linear(2, 2), **options).train_step


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["all used", "some unused"])
@pytest.mark.parametrize("make", [composable, by_method, prepared_late])
def test_each_backward_pass_has_one_wait_for_every_preparation_of_the_reducer(
    timeline: Timeline, make: Callable[..., Forward], options: dict[str, bool]
) -> None:
    forward = make(**options)
    for _ in range(3):
        forward(torch.ones(1, 2)).sum().backward()
        assert timeline.open_phases == (layout.OTHER, None)
    assert found(timeline) == (3, 0, True)


def test_replicate_with_a_static_graph_has_one_wait_each_backward_pass(timeline: Timeline) -> None:
    model = replicate(torch.nn.Linear(2, 2), static_graph=True)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert found(timeline) == (3, 0, True)


def test_a_backward_pass_that_replicate_does_not_synchronize_has_no_wait(timeline: Timeline) -> None:
    model: Any = replicate(torch.nn.Linear(2, 2))
    for synchronizes in (False, True, False):
        model.set_requires_gradient_sync(synchronizes)
        model(torch.ones(1, 2)).sum().backward()
    assert found(timeline) == (1, 0, True)


def test_a_backward_pass_with_given_inputs_ends_the_wait(timeline: Timeline, model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward(inputs=list(model.parameters()))
    assert timeline.open_phases == (layout.OTHER, None)
    assert found(timeline) == (1, 0, True)


def test_an_error_in_the_middle_of_the_wait_ends_it(timeline: Timeline, model: torch.nn.Module) -> None:
    def raising() -> None:
        raise RuntimeError("user error")

    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: ddp.queue_callback(raising))
    with pytest.raises(RuntimeError, match="user error"):
        model(torch.ones(1, 2)).sum().backward()
    DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # the first model is unusable
    assert timeline.open_phases == (layout.OTHER, None)
    assert timeline.writer.slots[INDEX["collective_op"]] == 0


class TrainsWithin(torch.autograd.Function):
    """A function whose backward pass trains another model, as reentrant checkpointing runs a segment."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, model: torch.nn.Module, timeline: Timeline) -> torch.Tensor:
        ctx.model, ctx.timeline = model, timeline
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        before = ctx.timeline.open_phases
        with torch.enable_grad():
            ctx.model(torch.ones(1, 2)).sum().backward()
        assert ctx.timeline.open_phases == before
        return gradients[0], None, None


def test_the_wait_of_a_nested_backward_pass_ends_with_the_inner_one(timeline: Timeline, model: torch.nn.Module) -> None:
    TrainsWithin.apply(torch.ones(2, requires_grad=True), model, timeline).sum().backward()
    assert timeline.open_phases == (layout.OTHER, None)
    assert found(timeline) == (1, 0, True)


def test_a_model_that_is_evaluated_before_it_is_trained(timeline: Timeline) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    with torch.inference_mode():  # like Lightning's sanity check: the buffers are broadcast here too
        model(torch.ones(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert found(timeline)[:2] == (1, 0)
