"""A job for torchrun whose rank 1 fails in the first attempt; the second attempt trains to its end."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from testing.leaving import leave
from torch.nn.parallel import DistributedDataParallel

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A separate store: otherwise gloo sometimes finds the first attempt's addresses (torch 2.13, with or without the hook).
agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt {attempt}", agents), rank=rank, world_size=size)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3 + attempt):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if attempt == 0 and step == 1 and dist.get_rank() == 1:
        raise RuntimeError("once")
dist.barrier()
leave()
