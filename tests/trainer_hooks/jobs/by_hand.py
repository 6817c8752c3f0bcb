"""A job that updates its parameters without an optimizer, alone or in DDP under torchrun. It prints its parameters.

The first argument is the number of backward passes.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from testing.leaving import leave
from testing.torchrun import report
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PASSES = int(sys.argv[1])


def main() -> None:
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    for (batch,) in DataLoader(TensorDataset(torch.randn(4 * PASSES, 4)), batch_size=4):
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    report([parameter.tolist() for parameter in network.parameters()])
    if dist.is_initialized():
        leave()


main()
