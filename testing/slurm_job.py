"""A training job of some seconds for Slurm: two ranks over gloo, one of which is slow after a third of the time.

Each rank writes when it started, had imported torch and the hook, and ended, by its own clock.
"""

import json
import os
import sys
import time
from pathlib import Path

BEGAN = time.time()

import torch  # noqa: E402 - the time of the imports is measured
import torch.distributed as dist  # noqa: E402 - as above
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - as above

IMPORTED = time.time()
STEP, DELAY = 0.02, 0.03  # seconds


class Slow(torch.nn.Linear):
    """A layer with a fixed duration."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP)
        return super().forward(batch)


def main() -> None:
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(Slow(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # All ranks make the same number of steps; their clocks differ.
    began, going = time.time(), torch.ones(1)
    while going.item():
        is_late = rank == 1 and time.time() - began > seconds / 3
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_late:
            time.sleep(DELAY)
        going = torch.tensor([float(time.time() - began < seconds)])
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
    dist.destroy_process_group()
    lived = {"began": BEGAN, "imported": IMPORTED, "ended": time.time(), "job": os.environ.get("SLURM_JOB_ID")}
    (directory / f"{lived['job']}.{rank}.json").write_text(json.dumps(lived))


if __name__ == "__main__":
    main()
