"""Attaching to this process: once, undone exactly, and never affecting the training."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testing.own_record import snapshot
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset, dataloader

import rankscope
from rankscope import guard
from rankscope.record import layout
from rankscope.timeline.steps import Steps
from rankscope.timeline.timeline import Timeline

PATCHED = (
    dataloader._BaseDataLoaderIter,
    torch.autograd,
    DistributedDataParallel,
    dist.ProcessGroup,
    dist.Work,
)


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    yield
    rankscope.uninstrument()


@pytest.fixture
def errors_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "reraise", True)


def train(steps: int = 5) -> list[torch.Tensor]:
    """Make a few steps in this process and return the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(4 * steps, 8)), batch_size=4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def state() -> list[dict[str, Any]]:
    hooks = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the attribute
    return [dict(vars(owner)) for owner in PATCHED] + [
        dict(hooks._global_optimizer_pre_hooks),
        dict(hooks._global_optimizer_post_hooks),
        {"save": torch.save, "serialization": torch.serialization.save, "autocast": torch.autocast.__enter__},
        {"tensor": dict(vars(torch.Tensor)), "gc": list(gc.callbacks)},
    ]


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_instrumenting_is_idempotent() -> None:
    rankscope.instrument()
    once = state()
    rankscope.instrument()
    assert state() == once


@pytest.mark.usefixtures("errors_raise")
def test_no_record_is_made_before_the_first_training_event(run_dir: Path) -> None:
    rankscope.instrument()
    list(DataLoader(TensorDataset(torch.zeros(4, 1))))
    assert list(run_dir.iterdir()) == []
    train(1)
    assert len(list(run_dir.iterdir())) == 1


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_a_plain_loop_is_counted_in_steps_and_phases() -> None:
    rankscope.instrument()
    train(5)
    rank = snapshot()
    assert rank["steps"] == 5
    for phase in ("startup", "data_wait", "backward", "optimizer", "other"):
        assert rank.phase_seconds[phase] > 0, phase


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_only_the_scripts_own_steps_count_once_it_marks_them() -> None:
    rankscope.instrument()
    rankscope.step()
    train(4)
    rankscope.step()
    assert snapshot()["steps"] == 2


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_the_users_own_phases_are_published_under_their_names() -> None:
    rankscope.instrument()
    train(1)
    with rankscope.phase("tokenize"):
        train(1)
    with rankscope.phase("evaluation"):
        train(1)
    seconds = snapshot().phase_seconds
    assert seconds["tokenize"] > 0
    assert seconds["evaluation"] > 0


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_excess_phases_are_other_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rankscope.instrument()
    train(1)
    for number in range(40):
        with rankscope.phase(f"phase {number}"):
            pass
    first_without = layout.MAX_PHASES - len(layout.PHASES)
    assert caplog.text.count("cannot record phase") == 1
    assert f"cannot record phase 'phase {first_without}'" in caplog.text
    assert len(snapshot().phase_seconds) == layout.MAX_PHASES


def test_phase_and_step_do_nothing_in_a_process_that_is_not_instrumented(run_dir: Path) -> None:
    with rankscope.phase("tokenize"):
        rankscope.step()
    assert list(run_dir.iterdir()) == []


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(("owner", "method"), [(Timeline, "enter"), (Timeline, "leave"), (Steps, "end")])
def test_an_error_in_a_probe_is_logged_once_and_changes_no_result(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the hook")

    monkeypatch.setattr(owner, method, broken)
    rankscope.instrument()
    assert all(map(torch.equal, expected, train(5)))
    messages = [entry.getMessage() for entry in caplog.records]
    assert messages
    assert len(messages) == len(set(messages))
    assert all("training is not affected" in message for message in messages)


def break_enter(monkeypatch: pytest.MonkeyPatch, phase: int, errors: int) -> None:
    """Let the first calls with this phase fail after the record is published."""
    enter, left = Timeline.enter, errors

    def broken(timeline: Timeline, entered: int, on_behalf: bool = False) -> Any:
        nonlocal left
        if entered == phase and timeline.steps.count and left:
            left -= 1
            raise RuntimeError("a bug in the hook")
        return enter(timeline, entered, on_behalf)

    monkeypatch.setattr(Timeline, "enter", broken)


@pytest.mark.usefixtures("run_dir")
def test_a_probe_that_keeps_failing_is_disabled_and_in_the_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_enter(monkeypatch, layout.BACKWARD, errors=100)
    rankscope.instrument()
    train(20)
    assert snapshot().info["probes_disabled"] == ["backward"]
    assert [entry.getMessage().partition("; ")[0] for entry in caplog.records] == [
        "rankscope: probe backward failed in one call, which does not count",
        "rankscope: probe backward failed",
    ]


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("errors", [1, 7])
def test_an_error_costs_its_call_and_not_the_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, errors: int
) -> None:
    break_enter(monkeypatch, layout.BACKWARD, errors)
    rankscope.instrument()
    train(20)
    rank = snapshot()
    assert (rank.info["probes_disabled"], rank["steps"], rank["micro_steps"]) == ([], 20, 20 - errors)
    assert rank.phase == "other"
    assert len(caplog.records) == 1


def test_errors_over_a_long_time_do_not_disable_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tested = guard.Guard("tested", lambda _: None)
    for _ in range(100):
        tested.handle(RuntimeError("a bug in the hook"))
        now += guard.WINDOW / 6
    assert not tested.disabled


@pytest.mark.usefixtures("run_dir")
def test_a_probe_that_cannot_be_installed_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("another version of torch")

    monkeypatch.setattr("rankscope.probes.backward.install", broken)
    rankscope.instrument()
    train()
    assert snapshot().info["probes_disabled"] == ["backward"]


@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_an_exception_of_the_job_is_raised_unchanged_and_no_phase_stays_open() -> None:
    rankscope.instrument()
    train(1)

    def failing(_: torch.Tensor) -> None:
        raise ZeroDivisionError("user error")

    weights = torch.ones(2, requires_grad=True)
    weights.register_hook(failing)
    with pytest.raises(ZeroDivisionError):
        weights.sum().backward()
    assert snapshot().phase == "other"


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
@pytest.mark.usefixtures("run_dir", "errors_raise")
def test_the_hook_does_not_cause_recompilations_of_a_compiled_optimizer() -> None:
    def compiled_frames(steps: int) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        weights = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weights], lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(steps):
            weights.grad = torch.ones(2)
            step()
        assert torch.allclose(weights, torch.ones(2) - 0.1 * steps)
        return int(torch._dynamo.utils.counters["frames"]["total"])

    register = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [add(lambda *_: None) for add in register]
    compiled_frames(5)  # the first time compiles more of torch itself
    with_another_hook = compiled_frames(5)
    for handle in handles:
        handle.remove()
    rankscope.instrument()
    assert compiled_frames(20) == compiled_frames(5) <= with_another_hook
