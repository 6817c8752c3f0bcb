"""The training loops whose steps are measured: short ones, one process each, so that nothing hides the cost."""

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
    """A plain model, a DataLoader and an optimizer; the phases of a step, for each contender's own loop."""

    ranks = 0  # of the process group; 0 without one
    sleep = 0.0  # seconds in each step

    def __init__(self) -> None:
        self.slept = 0.0  # seconds so far
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
        self.model = self.distribute(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
        self._loader = DataLoader(data, batch_size=16)
        self._batches: Iterator[Any] = iter(())

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it is trained."""
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
        """The gradients, averaged."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it

    def update(self) -> None:
        """The optimizer's step, and the time that a larger model would take."""
        self.optimizer.step()
        if self.sleep:
            began = time.perf_counter()
            time.sleep(self.sleep)
            self.slept += time.perf_counter() - began


class Ddp(Alone):
    """With everything that the probes watch: DDP, whose buffers are broadcast in forward."""

    ranks = 1

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it is trained."""
        return DistributedDataParallel(model)


class LongDdp(Ddp):
    """The same in steps of 100 ms, after which nothing of ours is in the caches."""

    sleep = 0.1


class Fsdp2(Alone):
    """`fully_shard`: each of its collectives, and each wait for one, is a call of its own. One rank makes none."""

    ranks = 2

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it is trained."""
        fully_shard(model)  # makes the model another class, in place
        return model


class ByHand(Alone):
    """The script averages each gradient itself."""

    ranks = 1

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients, averaged."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


TRAININGS: dict[str, type[Alone]] = {
    "ddp": Ddp,
    "ddp_100_ms": LongDdp,
    "alone": Alone,
    "fsdp2": Fsdp2,
    "by_hand": ByHand,
}
