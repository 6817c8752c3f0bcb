"""Copies from the host to a device that the training thread waits for: `Tensor.to`, `.cuda` and `.copy_`.

What is copied with `non_blocking` from pinned memory does not hold the thread up and is not counted.

The patch is a descriptor and not a function: `torch.Tensor.to` itself stays what it was, and only `tensor.to` finds
ours. For torch hands `getattr(torch.Tensor, "to")` to the `__torch_function__` of a subclass, which compares it by
identity or looks it up in tables that are older than we (torchvision's tv_tensors do); any other object there would
change what the job computes. It is put in place once a device is in use, so a job without one never meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.record import PLACES
from rankscope.timeline import Phases, Timeline

COPIES = PLACES["copies"]
COPY_BYTES = PLACES["copy_bytes"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses have a mind of their own, fake tensors among them

# These two are private and as old as the oldest torch that we support.
function_mode_is_on = torch._C._is_torch_function_mode_enabled  # noqa: SLF001 - a mode would see our questions

Method = Callable[..., Any]
Source = Callable[[Any, tuple[Any, ...], dict[str, Any]], "torch.Tensor | None"]


class Copies:
    """Decides which calls are blocking copies to one of `devices` (device types), and counts these."""

    def __init__(self, timeline: Timeline, guard: Guard, devices: frozenset[str]) -> None:
        self._timeline = timeline
        self._guard = guard
        self._devices = devices

    def source_of_to(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What `tensor.to(…)` copies to a device while the thread waits; None if it does not."""
        target = kwargs.get("device", args[0] if args else kwargs.get("tensor"))
        # to(device, dtype, non_blocking, …), to(dtype, non_blocking, …), to(tensor, non_blocking, …)
        place = 1 if isinstance(target, torch.Tensor) else 2
        return self._source(tensor, target, non_blocking(args, kwargs, place))

    def source_of_cuda(
        self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The same of `tensor.cuda(device, non_blocking)`."""
        return self._source(tensor, "cuda", non_blocking(args, kwargs, 1))

    def source_of_copy(
        self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The same of `tensor.copy_(source, non_blocking)`."""
        source: Any = args[0] if args else kwargs.get("other")
        return self._source(source, tensor, non_blocking(args, kwargs, 1)) if type(source) in PLAIN else None

    def run(self, source: torch.Tensor, call: Callable[[], Any]) -> Any:
        """Do the host's call, and charge it to the copy."""
        opened, size = self._begin(), 0.0
        try:
            result = call()
            size = float(source.nbytes)
            return result
        finally:
            self._end(opened, size)

    def _source(self, source: torch.Tensor, target: Any, is_non_blocking: bool) -> torch.Tensor | None:
        if not source.is_cpu or device_type(target) not in self._devices:
            return None
        return None if is_non_blocking and source.is_pinned() else source

    def _begin(self) -> Phases | None:
        try:
            return self._timeline.enter(record.H2D_COPY)
        except BaseException as error:
            self._guard.blow(error)
            return None

    def _end(self, opened: Phases | None, size: float) -> None:
        try:
            self._timeline.leave(opened)
            if opened and size:
                slots = self._timeline.writer.slots
                slots[COPIES] += 1
                slots[COPY_BYTES] += size
        except BaseException as error:
            self._guard.blow(error)


class WatchedMethod:
    """Stands in `torch.Tensor` for one of its methods: the class gives the method itself, a plain tensor ours."""

    def __init__(self, original: Any, copies: Copies, source: Source, guard: Guard, on_cpu: bool) -> None:
        self._original = original
        self._copies = copies
        self._source = source
        self._guard = guard
        self._on_cpu = on_cpu  # whether the tensor that the method is called of must be the host's

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self._original
        # The usual case first: a model's `.to(dtype)` of a device's tensor, hundreds a step.
        if owner not in PLAIN or function_mode_is_on() or tensor.is_cpu is not self._on_cpu:
            return self._original.__get__(tensor, owner)
        return MethodType(self._call, tensor)

    def _call(self, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if self._guard.blown or is_dynamo_compiling():
            return self._original(tensor, *args, **kwargs)
        source = None
        try:
            source = self._source(tensor, args, kwargs)
        except BaseException as error:
            self._guard.blow(error)
        if source is None:
            return self._original(tensor, *args, **kwargs)
        return self._copies.run(source, lambda: self._original(tensor, *args, **kwargs))


def non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    """The flag that all these methods have, by name or place."""
    return bool(kwargs.get("non_blocking", args[place] if len(args) > place else False))


def device_type(target: Any) -> str | None:
    """The type of a device however torch lets it be named; None if this names none."""
    if isinstance(target, torch.device):
        return target.type
    if type(target) in PLAIN:
        return str(target.device.type)
    if isinstance(target, str):
        return target.partition(":")[0]
    return "cuda" if isinstance(target, int) else None  # a plain number is a number of the accelerator's


class Patches:
    """Replaces the methods once `is_in_use` says that there is a device to copy to."""

    def __init__(
        self, timeline: Timeline, guard: Guard, devices: frozenset[str], is_in_use: Callable[[], bool]
    ) -> None:
        self._timeline, self._guard = timeline, guard
        self._copies = Copies(timeline, guard, devices)
        self._is_in_use = is_in_use
        self._undo: list[Undo] = []

    def look(self) -> None:
        """Put the patches in place, at the first look at which they are of use."""
        if self._undo or not self._is_in_use():
            return
        copies = self._copies
        methods = {"to": copies.source_of_to, "cuda": copies.source_of_cuda, "copy_": copies.source_of_copy}
        self._undo = [self._replace(name, source) for name, source in methods.items()]

    def remove(self) -> None:
        """Restore the methods."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _replace(self, name: str, source: Source) -> Undo:
        inherited = name not in vars(torch.Tensor)
        original = getattr(torch.Tensor, name)
        watched = WatchedMethod(original, self._copies, source, self._guard, on_cpu=name != "copy_")
        setattr(torch.Tensor, name, watched)

        def undo() -> None:
            if vars(torch.Tensor).get(name) is not watched:
                return  # somebody patched after us: what he put there ends in the method itself
            if inherited:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)

        return undo


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Wait for CUDA to be in use. Asking whether there is a GPU would initialise the driver before the job does."""
    patches = Patches(timeline, guard, frozenset({"cuda"}), torch.cuda.is_initialized)
    look: Any = guard(patches.look)
    timeline.looks.append(look)
    return [patches.remove, lambda: timeline.looks.remove(look)]
