"""A job for torchrun with four ranks that calls every kind of collective. Each rank prints one JSON line.

The line has the values in the record after each kind. The caller compares them with expected values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from testing.leaving import leave
from testing.own_record import snapshot
from testing.torchrun import report
from testing.waiting import in_a_thread
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import guard
from rankscope.record.layout import OPS
from rankscope.record.snapshot import RankSnapshot

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6, where FSDP2 does not train on a CPU
    fully_shard = None

FIELDS = (
    "collectives",
    "collective_seconds",
    "collective_duration_seconds",
    "collective_bytes",
    "collective_bus_bytes",
)
LATE = 0.3  # seconds


def difference(before: RankSnapshot, after: RankSnapshot) -> dict[str, Any]:
    """Return the changes in the record by field, for the operations or groups that changed."""
    found: dict[str, Any] = {}
    for names, fields in ((OPS, FIELDS), (after.groups, ("group_collectives", "group_wait_seconds"))):
        for field in fields:
            values = zip(names, before.many(field), after.many(field), strict=False)
            found[field] = {name: new - old for name, old, new in values if new != old}
    found["open"] = after["collective_op"]
    return found


def synchronous() -> None:
    if dist.get_rank() == 3:
        time.sleep(LATE)
    dist.all_reduce(torch.ones(100))


def asynchronous() -> None:
    """Rank 3 is late; the others do other work and then wait for it."""
    time.sleep(LATE if dist.get_rank() == 3 else 0)
    work = dist.all_reduce(torch.ones(100), async_op=True)
    time.sleep(LATE / 3)
    work.wait()


def asynchronous_by_future() -> None:
    time.sleep(LATE if dist.get_rank() == 3 else 0)
    dist.all_reduce(torch.ones(100), async_op=True).get_future().wait()


def asynchronous_and_complete() -> None:
    work = dist.all_reduce(torch.ones(100), async_op=True)
    time.sleep(LATE)
    work.wait()


def neighbors() -> None:
    rank = dist.get_rank()
    received = torch.empty(10)
    operations = [
        dist.P2POp(dist.isend, torch.ones(10), (rank + 1) % 4),
        dist.P2POp(dist.irecv, received, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def one_pair() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(10), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(10), 0)


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10))


def objects() -> None:
    dist.all_gather_object([None] * 4, "something")


def sharded_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (4,)))
    return model


def sharded(model: torch.nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def averaged(model: torch.nn.Module) -> None:
    """Run twelve passes: DDP's logger has measured ten at the eleventh forward. Rank 3 is late in each."""
    for _ in range(12):
        outputs = model(torch.ones(2, 8))
        time.sleep(LATE / 10 if dist.get_rank() == 3 else 0)
        outputs.sum().backward()


def kinds() -> dict[str, Callable[[], object]]:
    ones, rank = torch.ones(100), dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    again = dist.new_group([0, 1, 2, 3])
    interleaved = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replicated = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
    return {
        "all_reduce": synchronous,
        "async": asynchronous,
        "future": asynchronous_by_future,
        "thread": lambda: in_a_thread(synchronous),
        "complete": asynchronous_and_complete,
        "all_gather": lambda: dist.all_gather([torch.empty(100) for _ in range(4)], ones),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(400), ones),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(25), ones),
        "broadcast": lambda: dist.broadcast(ones, 0),
        "reduce": lambda: dist.reduce(ones, 0),
        "gather": lambda: dist.gather(ones, [torch.empty(100) for _ in range(4)] if rank == 0 else None),
        "scatter": lambda: dist.scatter(torch.empty(25), [torch.ones(25)] * 4 if rank == 0 else None),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(100), ones),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "neighbors": neighbors,
        "one_pair": one_pair,
        "coalesced": coalesced,
        "objects": objects,
        "half": lambda: dist.all_reduce(ones, group=halves[rank // 2]),
        "interleaved": lambda: dist.all_reduce(ones, group=interleaved[rank % 2]),
        "again": lambda: dist.all_reduce(ones, group=again),
        "functional": lambda: functional.all_reduce(ones, "sum", dist.group.WORLD) + 1,
        **({"fsdp2": partial(sharded, sharded_model())} if fully_shard else {}),
        "ddp": lambda: averaged(replicated),
    }


def main() -> None:
    guard.reraise = True
    dist.init_process_group("gloo")
    named = kinds()
    rankscope.instrument()
    dist.barrier()
    found = {}
    for name, call in named.items():
        before = snapshot()
        call()
        found[name] = difference(before, snapshot())
        dist.barrier()
    last = snapshot()
    line = {"rank": dist.get_rank(), "kinds": found, "groups": last.groups, "numbers": last.many("group_collectives")}
    rankscope.uninstrument()
    report(line)
    leave()


main()
