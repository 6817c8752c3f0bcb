"""The victim: two ranks that train by DistributedDataParallel over gloo, each step some 50 ms, most of it slept.

    torchrun --standalone --nproc-per-node 2 -m validation.siege.training DIRECTORY

Rank 0 writes when each step ended (unix time) and how long it took to DIRECTORY/steps, each rank its pid beside it; and
each twenty seconds a checkpoint, as a run that never writes one is told after a while.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from examples.digits_ddp import DeviceTime
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEVICE_SECONDS = 0.045
CHECKPOINT_STEPS = 400


def main() -> None:
    """Train until told to end, or until torchrun has gone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, rank, parent = Path(sys.argv[1]), dist.get_rank(), os.getppid()
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, targets = torch.rand(32, 64), torch.randint(10, (32,))
    with (directory / f"steps-{rank}").open("w", buffering=1) as steps:
        last, number = time.perf_counter(), 0
        while os.getppid() == parent:
            optimizer.zero_grad()
            scores = DeviceTime.apply(model(images), DEVICE_SECONDS)  # type: ignore[no-untyped-call]  # torch's
            nn.functional.cross_entropy(scores, targets).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            number += 1
            if rank == 0 and number % CHECKPOINT_STEPS == 0:
                torch.save(model.state_dict(), directory / "checkpoint.pt")
            now = time.perf_counter()
            steps.write(f"{time.time()} {now - last}\n")
            last = now


if __name__ == "__main__":
    main()
