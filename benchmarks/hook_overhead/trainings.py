"""The training loops whose steps are measured: short ones in one process, so that nothing hides the cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Alone:
    """A plain model, a DataLoader and an optimizer, with the phases of a step for each contender's own loop."""

    ranks = 0  # of the process group; 0 without one
    sleep = 0.0  # seconds in each step
    width = 64  # of the inputs
    batch_size = 16

    def __init__(self) -> None:
        self.slept = 0.0  # seconds so far
        torch.manual_seed(0)
        self.model = self.distribute(self.make())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        samples = self.batch_size * 256
        data = TensorDataset(torch.randn(samples, self.width), torch.randint(0, 10, (samples,)))
        self._loader = DataLoader(data, batch_size=self.batch_size)
        self._batches: Iterator[Any] = iter(())

    def make(self) -> torch.nn.Module:
        """Return the model of one process."""
        return torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model for training."""
        return model

    def fetch(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch

    def forward(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        return cross_entropy(self.model(batch[0]), batch[1])

    def backward(self, loss: torch.Tensor) -> None:
        """Compute and average the gradients."""
        loss.backward()

    def update(self) -> None:
        """Run the optimizer's step, then sleep for the time of a larger model."""
        self.optimizer.step()
        if self.sleep:
            began = time.perf_counter()
            time.sleep(self.sleep)
            self.slept += time.perf_counter() - began


class Ddp(Alone):
    """DDP, with everything that the probes watch; its buffers are broadcast in forward."""

    ranks = 1

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(model)


class LongDdp(Ddp):
    """The same in steps of 100 ms, after which the CPU's caches are cold."""

    sleep = 0.1


class Fsdp2(Alone):
    """`fully_shard`: each of its collectives, and each wait for one, is a separate call. One rank makes none."""

    ranks = 2

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        fully_shard(model)  # changes the model's class in place
        return model


class ByHand(Alone):
    """A script that averages each gradient by hand."""

    ranks = 1

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class Deep(Alone):
    """A step that computes for about 5 ms on the CPU, in many layers: each allocates and frees memory."""

    width = 192
    batch_size = 32
    layers = 26

    def make(self) -> torch.nn.Module:
        hidden = [torch.nn.Linear(self.width, self.width) for _ in range(self.layers)]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(self.width, 10))


class DeepDdp(Deep, Ddp):
    """The deep model with DDP."""


TRAININGS: dict[str, type[Alone]] = {
    "ddp": Ddp,
    "ddp_100_ms": LongDdp,
    "alone": Alone,
    "fsdp2": Fsdp2,
    "by_hand": ByHand,
}
for milliseconds, batch_size in (5, 32), (20, 160), (100, 800):
    for kind in Deep, DeepDdp:
        name = f"{kind.__name__.lower()}_{milliseconds}_ms"
        TRAININGS[name] = type(kind.__name__, (kind,), {"batch_size": batch_size})
