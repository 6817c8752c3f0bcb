"""Mixed precision: the gradient scaler's scale and its skipped steps, which do not count as steps."""

from __future__ import annotations

import pytest
import torch
from testing.own_record import snapshot
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import rankscope

STEPS = 8
OVERFLOWS = (0, 3, 4)  # steps with a non-finite gradient; the first is before any optimizer step
SCALE = 2.0**10


pytestmark = pytest.mark.usefixtures("hook_fails_loudly")


class OwnScaler(GradScaler):
    """A subclass, as in frameworks."""

    def step(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> float | None:
        return super().step(optimizer, *args, **kwargs)


class WithoutHooks(torch.optim.SGD):
    """An optimizer whose step calls no hooks."""

    def _patch_step_function(self) -> None:
        self._zero_grad_profile_name = "zero_grad"

    def step(self, closure: object = None) -> None:  # noqa: ARG002 - torch's, with overloads
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad


def train(
    make: type[GradScaler] = GradScaler,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    enabled: bool = True,
    unscale: bool = False,
    fused: bool = False,
) -> list[torch.Tensor]:
    """Make steps, with a non-finite gradient in those in OVERFLOWS, and return the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    options = {"fused": True} if fused else {}
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    scaler = make("cpu", init_scale=SCALE, enabled=enabled)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean() * (float("inf") if number in OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make", [GradScaler, OwnScaler])
@pytest.mark.parametrize(
    ("optimizer_class", "fused"),
    [(torch.optim.SGD, False), (torch.optim.AdamW, False), (torch.optim.SGD, True), (torch.optim.AdamW, True)],
)
def test_skipped_steps_are_counted_and_are_not_steps(
    make: type[GradScaler], optimizer_class: type[torch.optim.Optimizer], fused: bool, unscale: bool
) -> None:
    expected = train(make, optimizer_class, unscale=unscale, fused=fused)
    rankscope.instrument()
    assert all(map(torch.equal, expected, train(make, optimizer_class, unscale=unscale, fused=fused)))
    rank = snapshot()
    assert rank["amp_skipped_steps"] == len(OVERFLOWS)
    assert rank["steps"] == STEPS - len(OVERFLOWS)
    assert rank["micro_steps"] == STEPS
    assert rank["amp_scale"] == SCALE / 2 ** len(OVERFLOWS)


@pytest.mark.usefixtures("process_group")
def test_the_sharded_scaler_of_fsdp_is_watched_too() -> None:
    rankscope.instrument()
    train(ShardedGradScaler)
    assert snapshot()["amp_skipped_steps"] == len(OVERFLOWS)
    assert snapshot()["steps"] == STEPS - len(OVERFLOWS)


def test_a_scaler_that_is_not_enabled_has_no_scale() -> None:
    rankscope.instrument()
    train(enabled=False)
    assert snapshot()["amp_scale"] == 0
    assert snapshot()["amp_skipped_steps"] == 0
    assert snapshot()["steps"] == STEPS


def test_no_skipped_step_is_counted_for_an_optimizer_that_calls_no_hooks() -> None:
    rankscope.instrument()
    train(optimizer_class=WithoutHooks)
    assert snapshot()["amp_skipped_steps"] == 0
    assert snapshot()["amp_scale"] > 0


def test_a_scaler_that_refuses_to_step_raises_as_without_the_hook_and_counts_nothing() -> None:
    rankscope.instrument()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = GradScaler("cpu")
    torch.ones(1, requires_grad=True).sum().backward()
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    assert snapshot()["amp_skipped_steps"] == 0
    assert snapshot().phase == "startup"
