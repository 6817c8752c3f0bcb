"""Loops without an optimizer: only their backward passes show their steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from testing.own_record import snapshot
from testing.records import record_in
from testing.torchrun import environment, forked

import rankscope
from rankscope.attach import Attachment
from rankscope.record.layout import PASSES_WITHOUT_STEP
from rankscope.record.reader import read_rank

JOB = str(Path(__file__).parents[1] / "jobs" / "by_hand.py")
MORE = 30  # passes after PASSES_WITHOUT_STEP
STEPS = PASSES_WITHOUT_STEP + MORE
HINT = f"{PASSES_WITHOUT_STEP} backward passes without an optimizer step"


def run_job(ranks: int, passes: int, **variables: str) -> subprocess.CompletedProcess[str]:
    command = forked(ranks, JOB, passes) if ranks > 1 else [sys.executable, JOB, str(passes)]
    return subprocess.run(command, env=environment(**variables), check=True, capture_output=True, text=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_backward_passes_count_as_steps_and_this_is_logged_once(run_dir: Path, ranks: int) -> None:
    passes = STEPS
    plain, watched = run_job(ranks, passes), run_job(ranks, passes, RANKSCOPE="1")
    assert watched.stdout == plain.stdout
    assert watched.stderr.count(HINT) == 1
    records = [read_rank(path, with_steps=True) for path in run_dir.glob("*.rank")]
    assert [record["steps"] for record in records] == [STEPS] * ranks
    for record in records:
        assert record["micro_steps"] == passes
        assert record.phase_seconds["backward"] > 0
        assert record.info["settings"]["step_marker"] == "backward_pass"
        assert record.info["settings"]["accumulation_steps"] == ""
        assert [step.number for step in record.steps_after(PASSES_WITHOUT_STEP + 1)] == list(
            range(PASSES_WITHOUT_STEP + 2, STEPS + 1)
        )


def test_a_job_with_fewer_passes_has_no_step_and_prints_that_at_its_end(run_dir: Path) -> None:
    job = run_job(1, PASSES_WITHOUT_STEP, RANKSCOPE="1")
    assert record_in(run_dir)["steps"] == 0
    assert f"{PASSES_WITHOUT_STEP} backward passes but no step in" in job.stderr.splitlines()[-1]
    assert "rankscope.step()" in job.stderr.splitlines()[-1]


# Marks a step after many backward passes; called after the pass that ends the step.
Marker = Callable[[torch.nn.Module], None]


def by_optimizer(network: torch.nn.Module) -> None:
    torch.optim.SGD(network.parameters(), lr=0.1).step()


def by_script(_network: torch.nn.Module) -> None:
    rankscope.step(samples=7)


@pytest.fixture
def network(attached: Attachment) -> torch.nn.Module:
    return torch.nn.Linear(4, 4)


def accumulate(network: torch.nn.Module, passes: int) -> None:
    for _ in range(passes):
        network(torch.ones(4, 4)).square().mean().backward()


@pytest.mark.parametrize("mark", [by_optimizer, by_script])
def test_a_real_step_replaces_backward_passes_and_none_counts_twice(network: torch.nn.Module, mark: Marker) -> None:
    accumulate(network, STEPS)
    assert snapshot()["steps"] == STEPS
    mark(network)  # the last pass was this step's end
    assert snapshot()["steps"] == STEPS
    accumulate(network, 2 * PASSES_WITHOUT_STEP)
    assert snapshot()["steps"] == STEPS
    mark(network)
    assert snapshot()["steps"] == STEPS + 1


def test_optimizers_that_step_inside_the_backward_pass_replace_it_too(network: torch.nn.Module) -> None:
    accumulate(network, STEPS)
    for parameter in network.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        hook = optimizer.step
        parameter.register_post_accumulate_grad_hook(lambda _, hook=hook: hook())
    accumulate(network, 3)
    assert snapshot()["steps"] == STEPS + 3


@pytest.mark.parametrize("mark", [by_optimizer, by_script])
def test_a_step_within_the_limit_of_passes_is_an_ordinary_one(network: torch.nn.Module, mark: Marker) -> None:
    for step in range(1, 4):
        accumulate(network, PASSES_WITHOUT_STEP)
        assert snapshot()["steps"] == step - 1
        mark(network)
        assert snapshot()["steps"] == step


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
@pytest.mark.parametrize("compiled", [True, False])
def test_passes_after_the_last_step_of_an_optimizer_are_steps(network: torch.nn.Module, compiled: bool) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        accumulate(network, 1)
        optimizer.step()
    step = torch.compile(optimizer.step, backend="eager") if compiled else lambda: None
    accumulate(network, 1)
    step()
    is_seen = snapshot()["steps"] == 6  # Python 3.13 and torch 2.14 call the optimizer's hooks from compiled code
    assert compiled or not is_seen
    for passes in range(2, STEPS):
        accumulate(network, 1)
        step()
        assert snapshot()["steps"] == 5 + (passes if is_seen or passes > PASSES_WITHOUT_STEP else 0)
    accumulate(network, 1)
    optimizer.step() if is_seen else by_optimizer(network)  # the last pass was this step's end
    assert snapshot()["steps"] == 5 + STEPS


def test_a_loop_that_accumulates_over_many_passes_has_a_step_per_update(network: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seen = []
    for _ in range(4):
        accumulate(network, 3 * PASSES_WITHOUT_STEP)
        optimizer.step()
        seen.append(snapshot()["steps"])
    assert [count - seen[0] for count in seen] == [0, 1, 2, 3]


def test_passes_whose_steps_a_gradient_scaler_skips_are_not_steps(network: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = network(torch.ones(4, 4)).square().mean()
        scaler.scale(loss if number < 5 else loss * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert snapshot()["steps"] == 5


def test_passes_of_an_evaluation_after_steps_of_an_optimizer_are_not_steps(network: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(5):
            accumulate(network, 1)
            optimizer.step()
        network.eval()  # as for adversarial examples
        accumulate(network, 2 * PASSES_WITHOUT_STEP + 50)
        network.train()
    assert snapshot()["steps"] == 10


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
def test_the_steps_of_a_compiled_optimizer_are_its_backward_passes(network: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(STEPS):
        accumulate(network, 1)
        step()
    assert snapshot()["steps"] == STEPS


@pytest.mark.parametrize("update", ["data", "in place"])
def test_all_steps_of_models_without_an_optimizer_that_alternate_are_counted(attached: Attachment, update: str) -> None:
    models = [torch.nn.Linear(4, 4) for _ in range(3)]
    for _ in range(13):
        for model in models:
            for _step in range(3):
                accumulate(model, 1)
                for parameter in model.parameters():
                    change_by_hand(parameter, update)
    steps = attached.timeline.steps
    assert (steps.count, steps.micro_steps) == (117, 117)


def change_by_hand(parameter: torch.Tensor, update: str) -> None:
    assert parameter.grad is not None
    if update == "data":
        parameter.data -= 0.1 * parameter.grad
    else:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None
