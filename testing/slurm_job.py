"""A training job of some seconds for Slurm: two ranks over gloo, one of which is slow after a third of the time.

Each rank writes when its process started, and when it had imported torch and the hook. A child of each writes when the
process has ended: on a busy machine, the interpreter's start and shutdown take seconds.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.time()
STEP, DELAY = 0.02, 0.03  # seconds
WRITE_END = """
import os, select, sys, time
select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
with open(sys.argv[2], "w") as file:
    file.write(str(time.time()))
"""


def began() -> float:
    """Return the unix time when the process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


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
    first, going = time.time(), torch.ones(1)
    while going.item():
        is_late = rank == 1 and time.time() - first > seconds / 3
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_late:
            time.sleep(DELAY)
        going = torch.tensor([float(time.time() - first < seconds)])
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
    dist.destroy_process_group()
    path = directory / f"{os.environ.get('SLURM_JOB_ID')}.{rank}.json"
    path.write_text(json.dumps({"began": began(), "imported": IMPORTED}))
    subprocess.Popen([sys.executable, "-I", "-S", "-c", WRITE_END, str(os.getpid()), path.with_suffix(".end")])


if __name__ == "__main__":
    main()
