"""Steps and micro-steps in every kind of loop, each trained with and without the hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from testing.own_record import snapshot
from testing.waiting import in_a_thread

import rankscope
from rankscope.record.snapshot import RankSnapshot

ROUNDS = 6
SECONDS = 0.02

Loop = Callable[[], list[torch.nn.Parameter]]


pytestmark = pytest.mark.usefixtures("hook_fails_loudly")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def loss(network: torch.nn.Module) -> torch.Tensor:
    output: torch.Tensor = network(torch.randn(8, 4))
    return output.square().mean()


def accumulated() -> list[torch.nn.Parameter]:
    """Train with four backward passes per step."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(ROUNDS):
        for _ in range(4):
            (loss(network) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(network.parameters())


def gan() -> list[torch.nn.Parameter]:
    """Train a generator, with three steps of its critic per step."""
    generator, critic = model(), model()
    optimizers = [torch.optim.Adam(network.parameters()) for network in (generator, critic)]
    for _ in range(ROUNDS):
        for network, optimizer in [(generator, optimizers[0]), *[(critic, optimizers[1])] * 3]:
            optimizer.zero_grad()
            loss(torch.nn.Sequential(generator, critic) if network is generator else critic).backward()
            optimizer.step()
    return [*generator.parameters(), *critic.parameters()]


def two_each_step() -> list[torch.nn.Parameter]:
    """Train with one optimizer for some parameters and another for the rest."""
    network = model()
    matrices = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in network.parameters() if parameter.ndim != 2]
    optimizers = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest)]
    for _ in range(ROUNDS):
        loss(network).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return list(network.parameters())


def in_backward() -> list[torch.nn.Parameter]:
    """Train with an optimizer for each parameter that steps as soon as its gradient is computed."""
    network = model()
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(stepping(torch.optim.AdamW([parameter])))
    for _ in range(ROUNDS):
        loss(network).backward()
    return list(network.parameters())


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def lbfgs() -> list[torch.nn.Parameter]:
    """Train with a closure that the optimizer calls several times per step."""
    network = model()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    inputs = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = network(inputs).square().mean()
        value.backward()
        return value

    for _ in range(ROUNDS):
        optimizer.step(closure)
    return list(network.parameters())


def closure_with_everything() -> list[torch.nn.Parameter]:
    """Train like Lightning: forward and backward run inside the optimizer's step."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(network)
        value.backward()
        return value.item()

    for _ in range(ROUNDS):
        optimizer.step(closure)
    return list(network.parameters())


def gradient_penalty() -> list[torch.nn.Parameter]:
    """Train with a gradient of a gradient: torch.autograd.grad computes one in the forward pass."""
    network = model()
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(ROUNDS):
        inputs = torch.randn(8, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
        optimizer.zero_grad()
        slope.square().mean().backward()
        optimizer.step()
    return list(network.parameters())


def warmed_up() -> list[torch.nn.Parameter]:
    """Train the head first, then all layers with another optimizer, while the first optimizer still exists."""
    network = model()
    head = torch.optim.SGD(list(network.parameters())[2:], lr=0.1)
    everything = torch.optim.SGD(network.parameters(), lr=0.1)
    for optimizer, steps in ((head, 3), (everything, 300)):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(network).backward()
            optimizer.step()
    return list(network.parameters())


def then_in_backward() -> list[torch.nn.Parameter]:
    """Train with one optimizer first, then with one per parameter that steps inside the backward pass."""
    network = model()
    warm_up = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(20):
        warm_up.zero_grad()
        loss(network).backward()
        warm_up.step()
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(stepping(torch.optim.AdamW([parameter])))
    for _ in range(30):
        loss(network).backward()
    return list(network.parameters())


def models_in_turn() -> list[torch.nn.Parameter]:
    """Train three models with their own optimizers, one after the other in each of two epochs."""
    networks = [model() for _ in range(3)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    for _ in range(2):
        for network, optimizer in zip(networks, optimizers, strict=True):
            for _ in range(20):
                optimizer.zero_grad()
                loss(network).backward()
                optimizer.step()
    return [parameter for network in networks for parameter in network.parameters()]


def result(loop: Loop) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [parameter.detach().clone() for parameter in loop()]


def watched(loop: Loop) -> tuple[list[torch.Tensor], RankSnapshot]:
    rankscope.instrument()
    parameters = result(loop)
    return parameters, snapshot()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # torch 2.8's LBFGS
@pytest.mark.parametrize(
    ("loop", "steps", "micro_steps"),
    [
        (accumulated, ROUNDS, 4 * ROUNDS),
        (gan, ROUNDS, 4 * ROUNDS),
        (two_each_step, ROUNDS, ROUNDS),
        (in_backward, ROUNDS, ROUNDS),
        (lbfgs, ROUNDS, None),
        (closure_with_everything, ROUNDS, ROUNDS),
        (gradient_penalty, ROUNDS, ROUNDS),
    ],
)
def test_steps_and_micro_steps_are_counted_and_results_stay_bit_identical(
    loop: Loop, steps: int, micro_steps: int | None
) -> None:
    expected = result(loop)
    parameters, rank = watched(loop)
    assert all(map(torch.equal, expected, parameters))
    assert rank["steps"] == steps
    assert micro_steps is None or rank["micro_steps"] == micro_steps
    assert rank.phase == "other"


@pytest.mark.parametrize(("loop", "steps"), [(warmed_up, 303), (then_in_backward, 50), (models_in_turn, 120)])
def test_every_step_of_optimizers_that_replace_each_other_is_counted(loop: Loop, steps: int) -> None:
    expected = result(loop)
    parameters, rank = watched(loop)
    assert all(map(torch.equal, expected, parameters))
    assert rank["steps"] == steps
    in_histogram = sum(rank.many("step_buckets"))
    assert in_histogram == steps - 1  # the first step ends startup


class SlowSGD(torch.optim.SGD):
    """An optimizer whose own part of the step takes `SECONDS`, and raises if `fail` is set."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise FloatingPointError("user error")
        time.sleep(SECONDS)
        return super().step(closure)


def test_the_optimizers_time_does_not_include_the_phases_in_its_closure() -> None:
    rankscope.instrument()
    network = model()
    optimizer = SlowSGD(network.parameters(), lr=0.1)

    measured = []

    def closure() -> torch.Tensor:
        time.sleep(SECONDS)
        value = loss(network)
        with rankscope.phase("measure"):
            began = time.monotonic()
            time.sleep(3 * SECONDS)
            measured.append(time.monotonic() - began)
        value.backward()
        return value

    optimizer.step(closure)  # start-up
    began = time.monotonic()
    for _ in range(2):
        optimizer.step(closure)
    outside = time.monotonic() - began - sum(measured[1:])
    seconds = snapshot().phase_seconds
    assert seconds["measure"] >= 6 * SECONDS
    assert 2 * SECONDS <= seconds["optimizer"] <= outside


def test_a_step_that_raised_is_closed_when_another_optimizer_steps() -> None:
    rankscope.instrument()
    networks = [model(), model()]
    optimizers = [SlowSGD(network.parameters(), lr=0.1) for network in networks]
    for fails in (False, False, True, False):
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.fail = fails and network is networks[1]
            loss(network).backward()
            try:
                optimizer.step()
            except FloatingPointError:
                continue
    assert snapshot()["steps"] == 4
    assert snapshot().phase == "other"


@pytest.mark.filterwarnings("ignore")  # torch uses its own deprecated code
@pytest.mark.usefixtures("process_group")
def test_a_nested_optimizer_step_keeps_the_outer_one_open() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rankscope.instrument()
    network = model()
    optimizer = ZeroRedundancyOptimizer(network.parameters(), SlowSGD, lr=0.1)
    for _ in range(3):
        loss(network).backward()
        optimizer.step()
    assert snapshot()["steps"] == 3
    assert snapshot().phase_seconds["optimizer"] >= 2 * SECONDS
    assert snapshot().phase == "other"


def test_optimizers_that_step_on_a_thread_of_the_autograd_engine_do_not_take_over() -> None:
    """Step as on a GPU, where the hooks of a backward pass run on the device's thread while the caller waits."""
    rankscope.instrument()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def hook(_: torch.Tensor) -> None:
        in_a_thread(optimizer.step)

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        (weight * 2).backward()
    with rankscope.phase("afterwards"):
        time.sleep(SECONDS)
    assert snapshot()["steps"] == 4
    assert snapshot().phase_seconds["afterwards"] >= SECONDS


class SlowGradient(torch.autograd.Function):
    """A function whose backward takes `SECONDS`."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        time.sleep(SECONDS)
        return gradients[0] * 2


def test_gradients_by_autograd_grad_are_backward_but_not_micro_steps() -> None:
    rankscope.instrument()
    rankscope.step()
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(3):
        (gradient,) = torch.autograd.grad(SlowGradient.apply(weight), weight)
        weight.data -= gradient
    rankscope.step()
    assert snapshot().phase_seconds["backward"] >= 3 * SECONDS
    assert snapshot()["micro_steps"] == 0


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about torch's own code
def test_a_gradient_in_compiled_code_compiles_as_without_the_hook() -> None:
    def compiled_frames() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        weight = torch.nn.Parameter(torch.ones(4))

        @torch.compile(backend="eager")
        def slope(inputs: torch.Tensor) -> torch.Tensor:
            (gradient,) = torch.autograd.grad((inputs**2).sum(), inputs, create_graph=True)
            return gradient

        for _ in range(4):
            slope(weight).sum().backward()
        counted = torch._dynamo.utils.counters
        return counted["frames"]["total"], sum(counted["graph_break"].values())

    compiled_frames()  # the first time compiles more of torch itself
    expected = compiled_frames()
    rankscope.instrument()
    assert compiled_frames() == expected


def test_optimizer_steps_in_backward_mark_no_step_once_the_script_does() -> None:
    rankscope.instrument()
    rankscope.step()
    result(in_backward)
    assert snapshot()["steps"] == 1
