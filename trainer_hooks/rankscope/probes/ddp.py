"""DistributedDataParallel: its forward, its buffer broadcast, and the exposed wait of its gradient all-reduce.

The exposed wait is measured by the sandwich: the first gradient that reaches the module's output queues a
callback in the autograd engine. That one runs when the backward computation is done and before the reducer's own
callback, which waits for the all-reduce; it queues a second, which runs after the reducer's. What lies between the
two is the wait that the overlap with the backward computation did not hide. No communication hook is used: a user
may have one, and results stay bit-identical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.timeline import Depth, Timeline

DDP_ALL_REDUCE = record.OPS.index("ddp_all_reduce")
DDP_BROADCAST = record.OPS.index("ddp_broadcast")
MAX_OUTPUTS = 16  # outputs whose nodes get a hook; one would do, but any of them may stay out of the loss


class Sandwich:
    """Times the exposed all-reduce wait of each backward pass that DDP synchronises."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._in_flight = False
        self._depth: Depth = -1
        self._bytes = 0.0
        self._gradient_bytes = once_a_module(gradient_bytes)
        self._first, self._second = guard(self._before_reducer), guard(self._after_reducer)
        self._on_first_gradient = guard(self._queue)

    def arm(self, call: tuple[Any, ...], outputs: Any, _seconds: float) -> None:
        """After a forward whose backward will synchronise: hook the nodes that made the outputs."""
        module: DistributedDataParallel = call[0]
        # An exception in the last backward may have left it in flight.
        self._in_flight = False
        if not (module.require_backward_grad_sync and torch.is_grad_enabled()):
            return
        # A communication hook may compress: what it sends is its own affair, and we do not guess.
        self._bytes = 0.0 if module._comm_hooks else self._gradient_bytes(module)  # noqa: SLF001 - no public question
        for node in graph_nodes(outputs)[:MAX_OUTPUTS]:
            node.register_prehook(self._on_first_gradient)

    def _queue(self, gradients: object) -> None:  # noqa: ARG002 - torch's signature
        if not self._in_flight:
            self._in_flight = True
            queue_callback(self._first)

    def _before_reducer(self) -> None:
        # The engine may run this on a device's thread; the training thread waits for the engine.
        self._depth = self._timeline.enter(record.COLLECTIVE_WAIT, on_behalf=True)
        queue_callback(self._second)

    def _after_reducer(self) -> None:
        self._timeline.collective(DDP_ALL_REDUCE, self._timeline.leave(self._depth), self._bytes)
        self._in_flight = False


def gradient_bytes(module: torch.nn.Module) -> float:
    """Bytes of all gradients that the module's backward produces."""
    return float(sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad))


def buffer_bytes(module: torch.nn.Module) -> float:
    """Bytes of the buffers that DDP broadcasts."""
    return float(sum(buffer.nbytes for buffer in module.buffers()))


def once_a_module(size: Callable[[torch.nn.Module], float]) -> Callable[[torch.nn.Module], float]:
    """`size`, remembered: walking a large model would cost more than all the rest. DDP fixes both at its making."""
    known: dict[int, tuple[weakref.ref[torch.nn.Module], float]] = {}

    def remembered(module: torch.nn.Module) -> float:
        entry = known.get(id(module))
        if entry is None or entry[0]() is not module:
            known[id(module)] = entry = weakref.ref(module), size(module)
        return entry[1]

    return remembered


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - as DDP's and FSDP's own code


def graph_nodes(value: Any) -> list[Node]:
    """The autograd nodes that made a module's output, whatever containers hold its tensors.

    Hooking a node costs 10 µs a step, hooking the tensor 45 (docs/decisions/0002).
    """
    if isinstance(value, torch.Tensor):
        return [] if value.grad_fn is None else [value.grad_fn]
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        items = (getattr(value, name) for name in getattr(value, "__dataclass_fields__", ()))
    return [node for item in items for node in graph_nodes(item)]


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch DDP's forward and its buffer broadcast, and arm the sandwich."""
    payload = once_a_module(buffer_bytes)

    def count_broadcast(call: tuple[Any, ...], _result: object, seconds: float) -> None:
        timeline.collective(DDP_BROADCAST, seconds, payload(call[0]))

    forward = in_phase(timeline, guard, record.FORWARD, Sandwich(timeline, guard).arm)
    # By default DDP broadcasts its buffers in forward: the ranks wait there for whoever comes late to it.
    broadcast = in_phase(timeline, guard, record.COLLECTIVE_WAIT, count_broadcast)
    return [
        replace(DistributedDataParallel, "forward", forward),
        replace(DistributedDataParallel, "_sync_buffers", broadcast),
    ]
