"""The ways of training that the hook is asked about on a GPU. A way is one function, which makes a `Way` of layers.

One rank alone communicates with nobody, so each way says how its communication is made to take long: the stream in
which it happens sleeps on the device, below whatever the hook watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rankscope.patch import replace
from rankscope.probes.collectives import METHODS

SPIN = 10_000_000  # cycles: about 5 ms
SLOWED = frozenset({"all_reduce", "all_gather", "reduce_scatter"})

Issued = Counter[str]
"""Collectives by the record's name of their operation."""


@dataclass(frozen=True)
class Way:
    """What is trained, and how its gradients are averaged."""

    model: torch.nn.Module
    slowed: Callable[[Issued], AbstractContextManager[None]]
    """Within, each communication takes the device SPIN longer, and is counted."""
    average: Callable[[], object] = lambda: None
    """Between backward and the optimizer."""


class UnavailableError(Exception):
    """This torch does not have the way."""


def ddp(layers: torch.nn.Module) -> Way:
    """DistributedDataParallel. Its reducer's all-reduce is C++'s: a communication hook stands in for it."""
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)

    @contextmanager
    def slowed(issued: Issued) -> Iterator[None]:
        state = torch.cuda.Stream(), issued  # type: ignore[no-untyped-call]  # torch's
        # A lambda, for torch compares a hook's annotations, and here these are strings. It stays for good.
        model.register_comm_hook(state, lambda state, bucket: _spin_after_last(state[0], state[1], bucket))
        yield

    return Way(model, slowed)


def fsdp2(layers: torch.nn.Module) -> Way:
    """`fully_shard` of each layer."""
    return _fully_shard(layers, (1,), None)


def hsdp(layers: torch.nn.Module) -> Way:
    """`fully_shard` with replicas: its all-reduce has a stream of its own."""
    return _fully_shard(layers, (1, 1), ("replicate", "shard"))


def by_hand(layers: torch.nn.Module) -> Way:
    """All gradients are reduced in another stream, which the main one then waits for."""
    streams = _streams(layers)
    stream = streams.Stream()

    def average() -> None:
        stream.wait_stream(streams.current_stream())
        with streams.stream(stream):
            for parameter in layers.parameters():
                dist.all_reduce(parameter.grad)
        streams.current_stream().wait_stream(stream)

    return Way(layers, partial(_slow_collectives, None, streams), average)


def async_op(layers: torch.nn.Module) -> Way:
    """Each gradient's all-reduce is issued when it is there, in the autograd engine's thread, and waited for later."""
    streams, works = _streams(layers), list[Any]()

    def issue(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    def average() -> None:
        for work in works:
            work.wait()
        works.clear()

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(issue)  # type: ignore[no-untyped-call]  # torch's
    return Way(layers, partial(_slow_collectives, streams.Stream(), streams), average)


WAYS: dict[str, Callable[[torch.nn.Module], Way]] = {way.__name__: way for way in (ddp, fsdp2, hsdp, by_hand, async_op)}


class _One(int):
    """A world size of 1 that is not known for it."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return True


def _fully_shard(layers: torch.nn.Module, shape: tuple[int, ...], names: tuple[str, ...] | None) -> Way:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise UnavailableError(f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard") from None
    mesh = _mesh(_device_type(layers), shape, names)
    for layer in (*layers.children(), layers):
        if layer is layers or any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    sums: Any = getattr(layers, "set_force_sum_reduction_for_comms", None)
    if sums is not None:  # from torch 2.9 on; of one rank NCCL averages wrongly, it says
        sums(True)
    _communicate_alone()
    return Way(layers, partial(_slow_collectives, None, _streams(layers)))


@cache
def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """Made once, before `_communicate_alone`."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@cache
def _communicate_alone() -> None:
    """From torch 2.9 on FSDP2 issues nothing in a group whose `size()` is 1 or not above: say neither, for good."""
    replace(dist.ProcessGroup, "size", lambda original: lambda group: _One(original(group)))


@contextmanager
def _slow_collectives(beside: Any, streams: Any, issued: Issued) -> Iterator[None]:
    """The current stream sleeps after each collective; or, if it runs in a stream of NCCL's own, `beside` before it."""
    with ExitStack() as undo:
        for name, (op, _) in METHODS.items():
            if op in SLOWED and hasattr(dist.ProcessGroup, name):
                slower = partial(_slower, issued, op, beside, streams)
                undo.callback(replace(dist.ProcessGroup, name, slower))
        yield


def _slower(issued: Issued, op: str, beside: Any, streams: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def in_this_stream(*args: Any) -> Any:
        issued[op] += 1
        work = original(*args)
        spin()
        return work

    def in_another(*args: Any) -> Any:
        issued[op] += 1
        beside.wait_stream(streams.current_stream())
        with streams.stream(beside):  # NCCL's waits for the one that is current
            spin()
            return original(*args)

    return in_this_stream if beside is None else in_another


def _spin_after_last(stream: Any, issued: Issued, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: the stream is busy for a while after the last gradients."""
    gradients = bucket.buffer()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if bucket.is_last():
            issued["ddp_all_reduce"] += 1
            spin()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[gradients.device])
        future.set_result(gradients)
    return future


def spin() -> None:
    """The current stream does nothing for a while."""
    torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]


def _streams(layers: torch.nn.Module) -> Any:
    """torch.cuda, or on the CPU what has its shape."""
    return getattr(torch, _device_type(layers))


def _device_type(layers: torch.nn.Module) -> str:
    return next(layers.parameters()).device.type
