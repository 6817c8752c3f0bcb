"""A job for torchrun on the asynchronous device: a random rank is slow in each step, or the network is.

The first argument is `rotating` or `network`; the second how many steps. Each step is measured, so that a short job has
enough of them.
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch, read
from testing.leaving import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import guard
from rankscope.timeline import device_clock

COMPUTING, DELAY = 0.01, 0.03  # seconds


class Model(nn.Module):
    """One whose forward pass takes the device as long as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = COMPUTING
        self.scores = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        launch(1000 * self.seconds)
        scores: torch.Tensor = self.scores(inputs)
        return scores


def train(steps: int, rotates: bool) -> None:
    model = Model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    turns = random.Random(0)
    for _ in range(steps):
        is_slow = rotates and turns.randrange(dist.get_world_size()) == dist.get_rank()
        model.seconds = COMPUTING + DELAY * is_slow
        loss = parallel(torch.ones(8, 16)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        read(loss)


def main() -> None:
    """Under the hook, installed once the device is there."""
    guard.reraise = True
    device_clock.SECONDS_PER_MARK = 0.0
    what, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    with asynchronous_device(on_transfer=lambda: time.sleep(DELAY * (what == "network"))):
        rankscope.instrument()
        dist.init_process_group(BACKEND)
        train(steps, rotates=what == "rotating")
        leave()


if __name__ == "__main__":
    main()
