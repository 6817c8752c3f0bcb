"""A job for torchrun: DDP in which either a random rank is late in each step, or the network is slow.

The first argument is `rotating` or `network`; the second how many steps.
"""

# No future annotations: DDP checks those of a communication hook as objects.
import random
import sys
import threading
import time

import torch
import torch.distributed as dist
from testing.leaving import leave
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import guard

DELAY = 0.03  # seconds


def delayed_all_reduce(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """An all-reduce that takes longer for everybody: the backward pass goes on meanwhile.

    A thread of Python's delays it, which is joined at the end: one of gloo's that is in a callback of Python's while
    the interpreter ends aborts the process.
    """
    averaged = bucket.buffer().div_(dist.get_world_size())
    arrival = dist.all_reduce(averaged, async_op=True).get_future()
    late: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def deliver() -> None:
        arrival.wait()
        time.sleep(DELAY)
        late.set_result(averaged)

    threading.Thread(target=deliver).start()
    return late


def main() -> None:
    guard.reraise = True
    what, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    rankscope.instrument()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    if what == "network":
        model.register_comm_hook(None, delayed_all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    turns = random.Random(0)
    for _ in range(steps):
        if what == "rotating" and turns.randrange(dist.get_world_size()) == dist.get_rank():
            with rankscope.phase("data_wait"):
                time.sleep(DELAY)
        model(torch.ones(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    leave()


main()
