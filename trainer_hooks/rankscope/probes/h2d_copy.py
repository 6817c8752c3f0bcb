"""Copies from the host to a device that the training thread waits for: `Tensor.to`, `.cuda` and `.copy_`.

A `non_blocking` copy from pinned memory does not block the thread and is not counted. Only in a step that is measured
on the device it enters the phase, so that the device's time for it has a name and a prefetcher's stream is recognized
(streams.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.probes.span import Arguments
from rankscope.probes.tensor_methods import PLAIN, Begin, End, TensorMethods
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.phases import Phases
from rankscope.timeline.timeline import Timeline

COPIES = INDEX["copies"]
COPY_BYTES = INDEX["copy_bytes"]

# A copy's source, its target, and whether it is non-blocking.
Copy = tuple[Any, Any, bool]


class Copies:
    """Finds the calls that copy to one of `devices` (device types), and counts those that the thread waits for."""

    def __init__(self, timeline: Timeline, devices: frozenset[str]) -> None:
        self._timeline = timeline
        self._devices = devices

    def begin(self, read: Callable[[Any, Arguments, dict[str, Any]], Copy]) -> Begin:
        """Return the watch of a method; `read` returns the copy that a call makes."""

        def begin(tensor: Any, args: Arguments, kwargs: dict[str, Any]) -> End | None:
            source, target, is_non_blocking = read(tensor, args, kwargs)
            if type(source) not in PLAIN or not source.is_cpu or device_type(target) not in self._devices:
                return None
            is_awaited = not (is_non_blocking and source.is_pinned())
            if not is_awaited and self._timeline.on_boundary is None:
                return None
            opened = self._timeline.enter(layout.H2D_COPY)
            size = float(source.nbytes) if is_awaited else 0.0
            return lambda returned: self._end(opened, size * returned)

        return begin

    def _end(self, opened: Phases | None, size: float) -> None:
        self._timeline.leave(opened)
        if opened and size:
            slots = self._timeline.writer.slots
            slots[COPIES] += 1
            slots[COPY_BYTES] += size


def read_to(tensor: Any, args: Arguments, kwargs: dict[str, Any]) -> Copy:
    """Return the copy of `tensor.to(…)`."""
    target = kwargs.get("device", args[0] if args else kwargs.get("tensor"))
    # to(device, dtype, non_blocking, …), to(dtype, non_blocking, …), to(tensor, non_blocking, …)
    index = 1 if issubclass(type(target), torch.Tensor) else 2
    return tensor, target, non_blocking(args, kwargs, index)


def read_cuda(tensor: Any, args: Arguments, kwargs: dict[str, Any]) -> Copy:
    """Return the copy of `tensor.cuda(device, non_blocking)`."""
    return tensor, "cuda", non_blocking(args, kwargs, 1)


def read_copy(tensor: Any, args: Arguments, kwargs: dict[str, Any]) -> Copy:
    """Return the copy of `tensor.copy_(source, non_blocking)`."""
    return (args[0] if args else kwargs.get("other")), tensor, non_blocking(args, kwargs, 1)


def non_blocking(args: Arguments, kwargs: dict[str, Any], index: int) -> bool:
    """Return the argument `non_blocking` of a call, by name or index."""
    return kwargs.get("non_blocking", args[index] if len(args) > index else False) is True  # torch takes only a bool


def device_type(target: Any) -> str | None:
    """Return the type of a device given in any form that torch takes; None if this is not a device."""
    kind = type(target)
    if kind is torch.device:
        return str(target.type)
    if kind in PLAIN:
        return str(target.device.type)
    if issubclass(kind, str):
        return str.partition(target, ":")[0]
    return "cuda" if kind is int else None  # a plain number is the index of an accelerator


def methods(timeline: Timeline, devices: frozenset[str]) -> dict[str, tuple[Begin, bool]]:
    """Return the watched methods by name: what a call begins, and whether it is called on the host's tensors."""
    begin = Copies(timeline, devices).begin
    return {"to": (begin(read_to), True), "cuda": (begin(read_cuda), True), "copy_": (begin(read_copy), False)}


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch once CUDA is in use. A query for GPUs would initialize the driver before the job does."""
    watch = TensorMethods(methods(timeline, frozenset({"cuda"})), guard, torch.cuda.is_initialized)
    return [watch.remove, timeline.steps.add_poll(guard(watch.poll))]
