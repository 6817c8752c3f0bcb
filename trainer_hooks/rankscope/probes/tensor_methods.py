"""Watching the tensor methods that move data between the host and a device.

The patch is a descriptor: `torch.Tensor.to` remains the original object, and only `tensor.to` returns the wrapper.
torch passes `getattr(torch.Tensor, "to")` to the `__torch_function__` of a subclass, which compares it by identity or
looks it up in existing tables (torchvision's tv_tensors do). Another object would change what the job computes. The
patch is installed once a device is in use, so a job without one never gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Patches
from rankscope.probes.span import Arguments, around

PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses, such as fake tensors, may behave differently

# Private, but in every supported version of torch.
function_mode_is_on = torch._C._is_torch_function_mode_enabled  # noqa: SLF001 - a mode would see the hook's calls

# Called after the call, with whether it returned.
End = Callable[[bool], None]
# Called before a call of a tensor's method; returns its End, or None if the call does not count.
Begin = Callable[[Any, Arguments, dict[str, Any]], "End | None"]


class WatchedMethod:
    """A descriptor in `torch.Tensor`: the class returns the original method, a plain tensor the watched one."""

    def __init__(self, original: Any, begin: Begin, guard: Guard, on_cpu: bool) -> None:
        self._original = original
        self._watched = around(
            guard,
            lambda args, kwargs: begin(args[0], args[1:], kwargs),
            lambda end, _args, _result, returned: end(returned),
        )(original)
        self._on_cpu = on_cpu  # whether the method's tensor must be on the host

    def __get__(
        self,
        tensor: torch.Tensor | None,
        owner: type,
        plain: tuple[type, ...] = PLAIN,
        mode_is_on: Callable[[], bool] = function_mode_is_on,
        method: type[MethodType] = MethodType,
    ) -> Any:
        """Return the method. The defaults are names that it needs while the interpreter ends and clears modules."""
        if tensor is None:
            return self._original
        # The usual case first: a model's `.to(dtype)` of a device's tensor, hundreds per step.
        if owner not in plain or mode_is_on() or tensor.is_cpu is not self._on_cpu:
            return self._original.__get__(tensor, owner)
        return method(self._watched, tensor)


class TensorMethods:
    """Watches methods once `is_in_use` returns True.

    `methods` has for each name what a call begins, and whether its tensor is on the host or on a device.
    """

    def __init__(self, methods: Mapping[str, tuple[Begin, bool]], guard: Guard, is_in_use: Callable[[], bool]) -> None:
        self._methods = methods
        self._guard = guard
        self._is_in_use = is_in_use
        self._patches = Patches()
        self.remove = self._patches.undo

    def poll(self) -> None:
        """Install the patches at the first poll with a device in use."""
        if not self._patches and self._is_in_use():
            for name, (begin, on_cpu) in self._methods.items():
                make = partial(WatchedMethod, begin=begin, guard=self._guard, on_cpu=on_cpu)
                self._patches.add(torch.Tensor, name, make)
