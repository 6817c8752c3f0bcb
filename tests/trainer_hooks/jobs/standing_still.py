"""One of three ranks that hang: `standing_still.py KIND`. Rank 2 never calls the collective of the others.

Each trains three steps first and prints the path of its record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from testing.own_record import attachment
from testing.torchrun import report
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import guard


def main() -> None:
    guard.reraise = True
    dist.init_process_group("gloo")
    pair = dist.new_group([1, 2])
    rankscope.instrument()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    in_pair = dist.get_rank() > 0
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
        "pair": lambda: dist.all_gather([torch.empty(4)] * 2, torch.ones(4), group=pair) if in_pair else None,
        "ddp": step,
    }
    for _ in range(3):
        step()
    if in_pair:
        dist.all_reduce(torch.ones(4), group=pair)
    report(str(attachment().writer.path))
    if dist.get_rank() == 2:
        time.sleep(120)
    kinds[sys.argv[1]]()
    time.sleep(120)


main()
