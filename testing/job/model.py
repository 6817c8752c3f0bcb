"""The model, its batches, and the time that a device takes for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from testing.job.control import Behavior
from testing.job.device import Device, compute, sleep

WIDTH, CLASSES, BATCH = int(os.environ.get("WIDTH", "64")), 4, 32


class DeviceTime(torch.autograd.Function):
    """An identity function that takes device time in its forward and backward pass."""

    @staticmethod
    def forward(
        context: Any, inputs: torch.Tensor, take_forward: Callable[[], None], take_backward: Callable[[], None]
    ) -> torch.Tensor:
        """Take the time of the forward pass, and keep the function for the backward pass."""
        context.take_backward = take_backward
        take_forward()
        return inputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Take the time of the backward pass."""
        context.take_backward()
        return gradients[0], None, None


class Work(nn.Module):
    """A layer that takes the time of a behavior, divided by its micro-steps."""

    def __init__(self, device: Device, behavior: Behavior) -> None:
        super().__init__()
        self.behavior = behavior
        self.extra = 0.0
        """Milliseconds added to this forward pass."""
        self._device = device

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input after the behavior's time."""
        behavior, take = self.behavior, self._device.take
        compute(behavior.forward_cpu)
        forward = (behavior.forward + self.extra) / behavior.micro_steps
        backward = behavior.backward / behavior.micro_steps
        result: torch.Tensor = DeviceTime.apply(  # type: ignore[no-untyped-call]  # torch's
            inputs, lambda: take(forward, behavior.issue), lambda: take(backward, behavior.issue)
        )
        return result


def layers(work: Work) -> nn.Sequential:
    """Return the model, the same on all ranks, with the device's time between its two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), work, nn.Linear(WIDTH, CLASSES))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return a loss without targets: the outputs should be 0."""
    return outputs.square().mean()


class Samples(IterableDataset[dict[str, torch.Tensor]]):
    """Endless batches, each as slow as the latest behavior. The hook counts the `input_ids` as tokens."""

    def __init__(self, latest: Callable[[], Behavior]) -> None:
        self._latest = latest

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            behavior = self._latest()
            sleep(behavior.fetch)
            compute(behavior.fetch_cpu)
            yield {"input_ids": torch.randn(BATCH, WIDTH)}


class SlowlyPickled:
    """An object that calls a function while the checkpoint with it is written."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self._wait()
        return dict, ()


def save(optimizer: torch.optim.Optimizer, path: Path, wait: Callable[[], None]) -> None:
    """Write a checkpoint that takes the time of `wait`."""
    torch.save({"optimizer": optimizer.state_dict(), "delay": SlowlyPickled(wait)}, path)
