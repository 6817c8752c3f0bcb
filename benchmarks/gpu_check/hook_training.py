"""The training that shows the hook on a GPU: DDP on made-up batches, with the host ahead of the device all the time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

OPTIMIZER = "optimizer"  # what its steps are called in the profiler's timeline
SPIN = 10_000_000  # cycles: about 5 ms, the length of the communication that world size 1 has not
CLASSES = 10
BATCHES = 8  # again and again
WARM_UP = 130  # steps: the record is published, start-up is over, and the search for root modules (step 100) too

Batch = tuple[torch.Tensor, ...]


class Training:
    """A loop with what the probes watch, that itself never waits for the device until its end."""

    def __init__(self, device: torch.device, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self._device = device
        hidden = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        layers = torch.nn.Sequential(*hidden, torch.nn.Linear(width, CLASSES)).to(device)
        self.model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        made = [(torch.randn(batch, width), torch.randint(0, CLASSES, (batch,))) for _ in range(BATCHES)]
        batches = [tuple(map(torch.Tensor.pin_memory, one)) if device.type == "cuda" else one for one in made]
        self._loader = DataLoader(_Batches(batches), batch_size=None)
        self._batches = iter(self._loader)
        self.late = 0.0
        self.blocking = False  # copies to the device that the host waits for

    def slow_down(self) -> None:
        """Give world size 1 a communication: a stream of its own is busy for a while after the last gradients."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        # A lambda, for torch compares a hook's annotations, and here these are strings.
        self.model.register_comm_hook(stream, lambda state, bucket: _spin(state, bucket))

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
        """One."""
        inputs, targets = (tensor.to(self._device, non_blocking=not self.blocking) for tensor in self._next())
        if self.late:
            time.sleep(self.late)
        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        with record_function(OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Until the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def parameters(self) -> list[torch.Tensor]:
        """As they are now."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

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

    def __getitem__(self, place: int) -> Batch:
        return self._batches[place]

    def __len__(self) -> int:
        return len(self._batches)


def _spin(stream: torch.cuda.Stream, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if bucket.is_last():
            torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch's; there is no public one
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[gradients.device])
        future.set_result(gradients)
    return future
