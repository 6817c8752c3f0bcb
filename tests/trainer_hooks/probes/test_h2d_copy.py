"""Blocking copies to a device, with `meta` as the device: which ones count, without changing torch's behavior."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from testing.own_record import installed, seconds, value
from torch.overrides import TorchFunctionMode

from rankscope import guard
from rankscope.guard import MOST_ERRORS, Guard
from rankscope.probes import h2d_copy
from rankscope.probes.h2d_copy import methods
from rankscope.probes.tensor_methods import TensorMethods
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

BATCH = torch.zeros(8, 4)
METHODS = ("to", "cuda", "copy_")


def watch(timeline: Timeline, guarded: Guard | None = None) -> TensorMethods:
    guarded = guarded or Guard("h2d_copy", lambda _: None)
    return TensorMethods(methods(timeline, frozenset({"meta"})), guarded, lambda: True)


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    monkeypatch.setattr(guard, "reraise", True)
    timeline = Timeline(RankWriter())
    patches = watch(timeline)
    patches.poll()
    timeline.step()
    yield timeline
    patches.remove()


def counted(timeline: Timeline) -> tuple[float, float]:
    """Return the number of copies and their bytes."""
    return value(timeline, "copies"), value(timeline, "copy_bytes")


COPIES = {
    "a device": lambda: BATCH.to(torch.device("meta")),
    "its name": lambda: BATCH.to("meta"),
    "its name and number": lambda: BATCH.to("meta:0"),
    "a keyword": lambda: BATCH.to(device="meta", dtype=torch.float64),
    "a tensor": lambda: BATCH.to(torch.zeros(1, device="meta")),
    "a tensor by keyword": lambda: BATCH.to(tensor=torch.zeros(1, device="meta")),
    "copy_": lambda: torch.empty(8, 4, device="meta").copy_(BATCH),
    "copy_ by keyword": lambda: torch.empty(8, 4, device="meta").copy_(other=BATCH),
    "not pinned, so blocking": lambda: BATCH.to("meta", non_blocking=True),
    "a parameter": lambda: torch.nn.Parameter(BATCH).to("meta"),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_blocking_copy_is_counted_with_any_form_of_the_device(timeline: Timeline, name: str) -> None:
    assert COPIES[name]().device.type == "meta"
    assert counted(timeline) == (1, BATCH.nbytes)
    assert seconds(timeline, layout.H2D_COPY) > 0


OTHERS = {
    "to another type": lambda: BATCH.to(torch.float64),
    "to the same device": lambda: BATCH.to("cpu"),
    "between host tensors": lambda: torch.empty(8, 4).copy_(BATCH),
    "within the device": lambda: torch.empty(8, 4, device="meta").to("meta"),
    "on the device": lambda: torch.empty(2, device="meta").copy_(torch.empty(2, device="meta")),
    "another type on the device": lambda: torch.empty(2, device="meta").to(torch.float64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_counted(timeline: Timeline, name: str) -> None:
    OTHERS[name]()
    assert counted(timeline) == (0, 0)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_from_pinned_memory_counts_unless_it_is_non_blocking(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, non_blocking: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    BATCH.to("meta", non_blocking=non_blocking)
    BATCH.to("meta", torch.float32, non_blocking)
    BATCH.to(torch.zeros(1, device="meta"), non_blocking)
    torch.empty(8, 4, device="meta").copy_(BATCH, non_blocking)
    assert counted(timeline)[0] == (0 if non_blocking else 4)


def test_the_script_gets_the_calls_errors_and_no_phase_stays_open(timeline: Timeline) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.empty(3, device="meta").copy_(BATCH)
    with pytest.raises(RuntimeError, match="nonsense"):
        BATCH.to("nonsense")
    assert counted(timeline) == (0, 0)
    assert value(timeline, "phase") == layout.OTHER


class Labeled(torch.Tensor):
    """A subclass that compares functions by identity with a table made before the patch."""

    KNOWN = (torch.Tensor.to, torch.Tensor.copy_)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.Tensor.is_cpu.__get__, torch.Tensor.device.__get__):
            raise AssertionError("the hook read an attribute of a subclass")
        return answer if func in cls.KNOWN else torch.Tensor.as_subclass(answer, torch.Tensor)


def test_a_subclass_sees_the_functions_that_it_knows(timeline: Timeline) -> None:
    batch = BATCH.as_subclass(Labeled)
    assert type(batch.to(torch.float64)) is Labeled
    assert type(batch.to("meta")) is Labeled
    assert counted(timeline) == (0, 0)


def test_a_mode_sees_the_same_calls_as_without_the_hook(timeline: Timeline) -> None:
    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Log() as log:
        BATCH.to("meta")
    assert log.seen == [torch.Tensor.to]


def test_the_class_keeps_its_methods_and_its_attributes_are_restored() -> None:
    before, originals = dict(vars(torch.Tensor)), [getattr(torch.Tensor, name) for name in METHODS]
    patches = watch(Timeline(RankWriter()))
    patches.poll()
    assert set(vars(torch.Tensor)) - set(before) == set(METHODS)
    assert [getattr(torch.Tensor, name) for name in METHODS] == originals
    patches.remove()
    assert dict(vars(torch.Tensor)) == before


def test_a_job_without_a_device_never_gets_the_patches() -> None:
    before = dict(vars(torch.Tensor))
    timeline = Timeline(RankWriter())
    with installed(timeline, h2d_copy):
        timeline.step()
        assert dict(vars(torch.Tensor)) == before
    assert timeline.steps.polls == []


def test_errors_of_the_hook_disable_the_probe_and_copies_still_work() -> None:
    failed: list[str] = []
    timeline = Timeline(RankWriter())
    patches = watch(timeline, Guard("h2d_copy", failed.append))
    patches.poll()
    timeline.writer.slots = memoryview(b"")  # writes fail
    try:
        for _ in range(MOST_ERRORS + 1):
            assert BATCH.to("meta").device.type == "meta"
    finally:
        patches.remove()
    assert failed == ["h2d_copy"]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
def test_compiled_code_is_the_same_with_the_patches(timeline: Timeline) -> None:
    def work(inputs: torch.Tensor) -> torch.Tensor:
        doubled = inputs.to(torch.float64).to("cpu") * 2
        return torch.empty(8, 4, dtype=torch.float64).copy_(doubled)

    torch._dynamo.reset()
    explanation = torch._dynamo.explain(work)(BATCH)
    assert explanation.graph_break_count == 0
    assert torch.equal(torch.compile(work, backend="eager", fullgraph=True)(BATCH + 1), BATCH.double() + 2)
    moved = torch.compile(lambda inputs: inputs.to("meta"), backend="eager", fullgraph=True)(BATCH)
    assert moved.device.type == "meta"
