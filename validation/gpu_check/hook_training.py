"""The training that shows the hook on a GPU: a small model on made-up batches, in one of the ways of hook_ways.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset
from validation.gpu_check.hook_ways import WAYS

OPTIMIZER = "optimizer"  # what its steps are called in the profiler's timeline
CLASSES = 10
BATCHES = 4  # again and again
WARM_UP = 130  # steps: the record is published, start-up is over, and the search for root modules (step 100) too

Batch = tuple[torch.Tensor, ...]


class Training:
    """A loop with what the probes watch, that itself never waits for the device until its end, unless it reads.

    Raises UnavailableError if this torch does not have the way.
    """

    def __init__(self, device: torch.device, width: int, batch: int, way: str) -> None:
        torch.manual_seed(0)
        self._device = device
        with device:
            hidden = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
            layers = torch.nn.Sequential(*hidden, torch.nn.Linear(width, CLASSES))
        self._way = WAYS[way](layers)
        self.slowed = self._way.slowed
        self.optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
        made = [(torch.randn(batch, width), torch.randint(0, CLASSES, (batch,))) for _ in range(BATCHES)]
        batches = [tuple(map(torch.Tensor.pin_memory, one)) if device.type == "cuda" else one for one in made]
        self._loader = DataLoader(_Batches(batches), batch_size=None)
        self._batches = iter(self._loader)
        self.late = 0.0  # seconds of the host's before each forward
        self.pause = 0.0  # and after each step
        self.blocking = False  # copies to the device that the host waits for
        self.reads = False  # the loss, after each step
        self.waits = 0  # of the host for the device: how often the loop asked for it, and seconds
        self.waited = 0.0

    def warm_up(self) -> None:
        """Train until a step costs what it will cost."""
        self.run(WARM_UP)

    def run(self, steps: int) -> float:
        """Seconds a step over `steps` steps and until the device is done."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - began) / steps

    def step(self) -> None:
        inputs, targets = (tensor.to(self._device, non_blocking=not self.blocking) for tensor in self._next())
        if self.late:
            time.sleep(self.late)
        loss = torch.nn.functional.cross_entropy(self._way.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._way.average()
        with record_function(OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.reads:
            self._wait(loss.item)
        if self.pause:
            time.sleep(self.pause)

    def synchronize(self) -> None:
        """Until the device is done."""
        if self._device.type == "cuda":
            self._wait(torch.cuda.synchronize)

    def parameters(self) -> list[torch.Tensor]:
        """As they are now: what this rank has of them."""
        found = (parameter.detach() for parameter in self._way.model.parameters())
        return [(part.to_local() if hasattr(part, "to_local") else part).clone() for part in found]

    def _wait(self, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        call()
        self.waits += 1
        self.waited += time.perf_counter() - began

    def _next(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


class _Batches(Dataset[Batch]):
    """Made beforehand, and in pinned memory where that matters: fetching one costs the host next to nothing."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)
