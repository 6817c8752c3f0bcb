"""Jobs whose last rank ends in one of several ways while the others train, forked from one process that imports torch.

    python -m testing.departing_jobs RUN_DIR 4 sys_exit sigterm …

Each job is a run with the name of its way. The ranks train over gloo, so that the others fail when one is gone. A job
of more than two ranks has a launcher that ends the rest with SIGTERM when a rank has failed, as torchrun does.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
import torch._dynamo  # which the first optimizer of each forked process would import
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import probes

ENDS_AT, STEPS = 40, 60
STEP_SECONDS = 0.1
LINGERS = 20.0
"""Seconds for which a rank that has left its group still runs, as for an upload."""
EXITS: dict[str, Callable[[], object]] = {
    "os_exit": lambda: os._exit(0),
    "os_exit_3": lambda: os._exit(3),
    "sys_exit": lambda: sys.exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
"""How the last rank ends within a step."""
RETURNS = ("returns", "lingers")
"""It leaves the loop, destroys its group, and returns, at once or later."""
OTHERS = ("error", "error_at_the_end", "ends", "join")
"""It raises an exception of its own; rank 0 does after the training; no rank does; the last one has fewer batches, and
the others know it."""
WAYS = (*EXITS, *RETURNS, *OTHERS)


def train(way: str, rank: int, ranks: int) -> None:
    """Train as one rank of a job."""
    is_last = rank == ranks - 1
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Join([model]) if way == "join" else nullcontext():
            for step in range(STEPS):
                if is_last and step == ENDS_AT and way not in ("ends", "error_at_the_end"):
                    if way == "error":
                        raise ValueError("a bug of the script")
                    if way in (*RETURNS, "join"):
                        break
                    EXITS[way]()
                time.sleep(STEP_SECONDS)
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    if way == "lingers" and is_last:
        time.sleep(LINGERS)
    if way == "error_at_the_end" and rank == 0:
        time.sleep(1.0)
        raise OSError("no space left for the results")


def start(run_dir: str, way: str, ranks: int) -> list[int]:
    """Fork the ranks of a job, and return their pids. In a rank, it ends the process like a script."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(RANKSCOPE_RUN_DIR=run_dir, RANKSCOPE_RUN=way, GLOO_SOCKET_IFNAME="lo")
            rankscope.instrument()
            store = f"file://{run_dir}/store-{way}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
            train(way, rank, ranks)
            sys.exit()
        pids.append(pid)
    return pids


def launch(run_dir: str, ways: list[str], ranks: int) -> None:
    """Run the jobs at the same time, and wait for their ranks."""
    jobs = {way: start(run_dir, way, ranks) for way in ways}
    running = {pid: way for way, pids in jobs.items() for pid in pids}
    while running:
        pid, status = os.wait()
        way = running.pop(pid)
        if status and ranks > 2:
            for other in jobs[way]:
                if other in running:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGTERM)


def main() -> None:
    run_dir, ranks, *ways = sys.argv[1:]
    torch.set_num_threads(1)
    probes.all_probes()
    probes.late_probes()
    print("ready", flush=True)
    launch(run_dir, ways or [*WAYS], int(ranks))


if __name__ == "__main__":
    main()
