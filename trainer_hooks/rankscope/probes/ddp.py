"""DistributedDataParallel: its forward, its buffer broadcast, and the exposed wait of its gradient all-reduce.

The exposed wait is measured by the sandwich: the first gradient that reaches the module's output queues a
callback in the autograd engine. That one runs when the backward computation is done and before the reducer's own
callback, which waits for the all-reduce; it queues a second, which runs after the reducer's. What lies between the
two is the wait that the overlap with the backward computation did not hide. No communication hook is used: a user
may have one, and results stay bit-identical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.backward import not_while_compiling
from rankscope.probes.span import in_phase
from rankscope.timeline import Depth, Timeline

DDP_ALL_REDUCE = record.OPS.index("ddp_all_reduce")
DDP_BROADCAST = record.OPS.index("ddp_broadcast")
MAX_OUTPUTS = 16  # output tensors that get a hook; one would do, but any of them may stay out of the loss


class Sandwich:
    """Times the exposed all-reduce wait of each backward pass that DDP synchronises."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._in_flight = False
        self._depth: Depth = -1
        self._began = 0.0
        self._bytes = 0.0
        self._sizes: weakref.WeakKeyDictionary[torch.nn.Module, float] = weakref.WeakKeyDictionary()
        self._first, self._second = guard(self._before_reducer), guard(self._after_reducer)
        self._on_first_gradient = guard(self._queue)

    def arm(self, module: DistributedDataParallel, outputs: Any) -> None:
        """After a forward whose backward will synchronise: hook the outputs."""
        # An exception in the last backward may have left it in flight.
        self._in_flight = False
        if not (torch.is_grad_enabled() and module.require_backward_grad_sync and self._timeline.is_mine()):
            return
        self._bytes = self._gradient_bytes(module)
        for _, tensor in zip(range(MAX_OUTPUTS), tensors_with_grad(outputs), strict=False):
            tensor.register_hook(self._on_first_gradient)  # type: ignore[no-untyped-call]  # torch has no types here

    def _queue(self, gradient: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        if not self._in_flight:
            self._in_flight = True
            queue_callback(self._first)

    def _before_reducer(self) -> None:
        self._began = monotonic()
        self._depth = self._timeline.push(record.COLLECTIVE_WAIT)
        if self._depth > 0:
            queue_callback(self._second)

    def _after_reducer(self) -> None:
        self._timeline.leave(self._depth)
        self._timeline.collective(DDP_ALL_REDUCE, monotonic() - self._began, self._bytes)
        self._in_flight = False

    def _gradient_bytes(self, module: DistributedDataParallel) -> float:
        size = self._sizes.get(module)
        if size is None:
            size = float(sum(p.nbytes for p in module.parameters() if p.requires_grad))
            self._sizes[module] = size
        # A communication hook may compress: what it sends is its own affair, and we do not guess.
        return 0.0 if module._comm_hooks else size  # noqa: SLF001 - there is no public question


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - as DDP's and FSDP's own code


def tensors_with_grad(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output that a gradient will reach, whatever containers hold them."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_with_grad(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_with_grad(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_with_grad(getattr(value, name))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch DDP's forward and its buffer broadcast, and arm the sandwich."""
    arm = guard(Sandwich(timeline, guard).arm)

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        timed = in_phase(timeline, guard, record.FORWARD)(original)

        def watched(module: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            outputs = timed(module, *inputs, **kwargs)
            arm(module, outputs)
            return outputs

        return watched

    return [
        replace(DistributedDataParallel, "forward", not_while_compiling(forward)),
        replace(DistributedDataParallel, "_sync_buffers", _timed_broadcast(timeline, guard)),
    ]


def _timed_broadcast(timeline: Timeline, guard: Guard) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """DDP broadcasts buffers in forward by default: the ranks wait there for whoever comes late to it."""
    enter, leave = guard(timeline.enter), guard(timeline.leave)

    @guard
    def count(module: torch.nn.Module, seconds: float) -> None:
        if timeline.is_mine():
            timeline.collective(DDP_BROADCAST, seconds, float(sum(buffer.nbytes for buffer in module.buffers())))

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def sync_buffers(module: torch.nn.Module) -> Any:
            began = monotonic()
            depth = enter(record.COLLECTIVE_WAIT)
            try:
                return original(module)
            finally:
                if depth is not None:
                    leave(depth)
                count(module, monotonic() - began)

        return sync_buffers

    return wrap
