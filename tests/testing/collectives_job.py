"""A job for torchrun, four ranks on the asynchronous device. Rank 0 prints a JSON line for each check that held.

    torchrun --nproc-per-node 4 tests/testing/collectives_job.py

Nothing is timed: a gate in a stream blocks the device for as long as the check needs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from testing.asynchronous_device import BACKEND, asynchronous_device, launch, read
from testing.own_record import snapshot
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import guard
from rankscope.record.layout import OPS

BATCH = 8


def check_a_wait_blocks_the_stream_and_not_the_host() -> None:
    with gate() as opened:  # blocks the device of every rank before the collective
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        after = recorded()
        assert not work.is_completed()
        assert not after.query()
        opened.set()
        read(torch.ones(1))
        assert work.is_completed()
        assert after.query()


def check_a_collective_ends_once_every_rank_has_arrived() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["others have issued theirs"])
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        store.set("others have issued theirs", "")
    work.wait()
    read(torch.ones(1))
    assert work.is_completed()


def check_a_synchronous_call_blocks_the_stream_and_returns_no_work() -> None:
    with gate() as opened:
        assert dist.all_reduce(torch.ones(3)) is None
        assert not recorded().query()
        opened.set()


def check_a_barrier_blocks_the_host() -> None:
    launch(5)
    event = recorded()
    dist.barrier()
    assert event.query()


def check_results_are_there_at_once_finite_and_of_the_right_shape() -> None:
    size, own = dist.get_world_size(), torch.full((2,), float(dist.get_rank()))
    gathered = [torch.empty(2) for _ in range(size)]
    into, scattered = torch.full((2 * size,), float("nan")), torch.full((2,), float("nan"))
    with gate() as opened:
        dist.all_gather(gathered, own)
        dist.all_gather_into_tensor(into, own)
        dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * size))
        exchanged = torch.empty(size)
        dist.all_to_all_single(exchanged, torch.arange(float(size)))
        opened.set()
    assert all(torch.equal(part, own) for part in gathered)
    assert torch.equal(into, own.repeat(size))
    assert torch.equal(scattered, torch.tensor([2.0, 3.0]) + 2 * (dist.get_rank() - 1))
    assert torch.equal(exchanged, torch.arange(float(size)))
    sent: list[object] = [None] * size
    dist.all_gather_object(sent, "mine")
    assert sent == ["mine"] * size


def check_issued_collectives_are_counted_without_point_to_point() -> None:
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    with gate() as opened:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0)
        exchange_with_the_neighbor()
        assert group._get_sequence_number_for_group() == before + 2
        opened.set()


def check_neighbors_send_to_each_other_in_one_batch() -> None:
    with waiting_on_the_device():
        exchange_with_the_neighbor()


def check_objects_sent_between_two_ranks_arrive() -> None:
    objects: list[object] = [{"from": dist.get_rank()}]
    if dist.get_rank() % 2 == 0:
        dist.send_object_list(objects, dist.get_rank() + 1)
    else:
        dist.recv_object_list(objects, dist.get_rank() - 1)
        assert objects == [{"from": dist.get_rank() - 1}]


def check_ddp_waits_on_the_device_and_not_on_the_host() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    for _ in range(3):
        with waiting_on_the_device():
            model(torch.randn(BATCH, 4)).sum().backward()  # broadcasts its buffers, then averages its gradients


def check_ddp_waits_at_the_end_of_the_backward_pass() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    group, rest = dist.group.WORLD, threading.Event()
    group._stream("all", -1).put(rest.wait)  # blocks the communication of this rank
    loss = model(torch.randn(BATCH, 4)).sum()
    computed: list[torch.cuda.Event] = []
    model.module.bias.register_post_accumulate_grad_hook(lambda _: computed.append(recorded()))
    loss.backward()
    after = recorded()
    computed[-1].synchronize()
    assert not after.query()
    rest.set()
    after.synchronize()


def check_a_communication_hook_of_the_job_is_waited_for() -> None:
    def average(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        arrival = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return arrival.then(lambda done: done.value()[0])

    average.__annotations__.clear()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, average)
    with waiting_on_the_device():
        model(torch.randn(BATCH, 4)).sum().backward()


def check_fsdp2_and_hsdp_wait_on_the_device() -> None:
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for layer in (model[0], model[1], model):
            fully_shard(layer, mesh=mesh)
        for _ in range(2):
            with waiting_on_the_device():
                model(torch.randn(BATCH, 4)).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def check_a_functional_collective_is_waited_for_at_its_first_use() -> None:
    with waiting_on_the_device():
        result = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
        assert torch.equal(result + 1, torch.full((3,), 2.0))


def check_the_hook_counts_what_python_issues_and_not_what_cpp_does() -> None:
    rankscope.instrument()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.randn(BATCH, 4)).sum().backward()
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).wait()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    counted = dict(zip(OPS, snapshot().many("collectives"), strict=False))
    rankscope.uninstrument()
    assert {op: count for op, count in counted.items() if count} == {"all_reduce": 6, "ddp_all_reduce": 2}


@contextmanager
def gate() -> Iterator[threading.Event]:
    """Block the current stream until the event is set, then wait for its end. The job's time limit ends a deadlock."""
    opened = threading.Event()
    torch.cuda.current_stream().put(opened.wait)
    try:
        yield opened
    finally:
        opened.set()
    torch.cuda.synchronize()


@contextmanager
def waiting_on_the_device() -> Iterator[None]:
    """Check that the device waits for the block's work while the device is blocked, and the host does not."""
    with gate() as opened:
        yield
        after = recorded()
        assert not after.query()
        opened.set()
        after.synchronize()


def recorded() -> torch.cuda.Event:
    """Return an event at the end of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def exchange_with_the_neighbor() -> None:
    """Send and receive in one batch: one after the other would deadlock."""
    peer = dist.get_rank() ^ 1
    sends = dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer)
    for work in dist.batch_isend_irecv([*sends]):
        work.wait()


def checks() -> dict[str, Callable[[], None]]:
    """Return all checks, in the order of this file."""
    return {name: check for name, check in globals().items() if name.startswith("check_")}


def main() -> None:
    guard.reraise = True
    with asynchronous_device():
        dist.init_process_group(BACKEND)
        for name, check in checks().items():
            check()
            dist.barrier()
            if dist.get_rank() == 0:
                print(json.dumps(name), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
