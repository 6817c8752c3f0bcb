"""Watching methods of a tensor that move data between the host and a device, once a device is in use.

The patch is a descriptor and not a function: `torch.Tensor.to` itself stays what it was, and only `tensor.to` finds
ours. For torch hands `getattr(torch.Tensor, "to")` to the `__torch_function__` of a subclass, which compares it by
identity or looks it up in tables that are older than we (torchvision's tv_tensors do); any other object there would
change what the job computes. It is put in place once a device is in use, so a job without one never meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.probes.span import Arguments, around

PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses have a mind of their own, fake tensors among them

# These two are private and as old as the oldest torch that we support.
function_mode_is_on = torch._C._is_torch_function_mode_enabled  # noqa: SLF001 - a mode would see our questions

# Ends what a call means; with whether the call returned.
End = Callable[[bool], None]
# Begins what a call of a tensor's method means and returns what ends it; None if it means nothing.
Begin = Callable[[Any, Arguments, dict[str, Any]], "End | None"]


class WatchedMethod:
    """Stands in `torch.Tensor` for one of its methods: the class gives the method itself, a plain tensor ours."""

    def __init__(self, original: Any, begin: Begin, guard: Guard, on_cpu: bool) -> None:
        self._original = original
        self._watched = around(
            guard,
            lambda args, kwargs: begin(args[0], args[1:], kwargs),
            lambda end, _args, _result, returned: end(returned),
        )(original)
        self._on_cpu = on_cpu  # whether the tensor that the method is called of must be the host's

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self._original
        # The usual case first: a model's `.to(dtype)` of a device's tensor, hundreds a step.
        if owner not in PLAIN or function_mode_is_on() or tensor.is_cpu is not self._on_cpu:
            return self._original.__get__(tensor, owner)
        return MethodType(self._watched, tensor)


class TensorMethods:
    """Watches methods once `is_in_use` says that there is a device.

    `methods` has for each name what a call begins, and whether it is called of the host's tensors or of a device's.
    """

    def __init__(self, methods: Mapping[str, tuple[Begin, bool]], guard: Guard, is_in_use: Callable[[], bool]) -> None:
        self._methods = methods
        self._guard = guard
        self._is_in_use = is_in_use
        self._undo: list[Undo] = []

    def poll(self) -> None:
        """Put the patches in place, at the first poll at which they are of use."""
        if not self._undo and self._is_in_use():
            self._undo = [self._replace(name, *watch) for name, watch in self._methods.items()]

    def remove(self) -> None:
        """Restore the methods."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _replace(self, name: str, begin: Begin, on_cpu: bool) -> Undo:
        inherited = name not in vars(torch.Tensor)
        original = getattr(torch.Tensor, name)
        watched = WatchedMethod(original, begin, self._guard, on_cpu)
        setattr(torch.Tensor, name, watched)

        def undo() -> None:
            if vars(torch.Tensor).get(name) is not watched:
                return  # somebody patched after us: what he put there ends in the method itself
            if inherited:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)

        return undo
