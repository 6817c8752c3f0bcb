"""A training job of some seconds for Slurm: two ranks over gloo, one of which is slow after a third of the time.

Each rank writes when it started, and when it had imported torch and the hook. A child of each writes when the rank has
ended: the interpreter's shutdown takes a second on a busy machine.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

BEGAN = time.time()

import torch  # noqa: E402 - the time of the imports is measured
import torch.distributed as dist  # noqa: E402 - as above
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - as above

IMPORTED = time.time()
STEP, DELAY = 0.02, 0.03  # seconds
WRITE_END = """
import os, select, sys, time
select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
with open(sys.argv[2], "w") as file:
    file.write(str(time.time()))
"""


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
    path = directory / f"{os.environ.get('SLURM_JOB_ID')}.{rank}.json"
    path.write_text(json.dumps({"began": BEGAN, "imported": IMPORTED}))
    subprocess.Popen([sys.executable, "-I", "-S", "-c", WRITE_END, str(os.getpid()), path.with_suffix(".end")])


if __name__ == "__main__":
    main()
