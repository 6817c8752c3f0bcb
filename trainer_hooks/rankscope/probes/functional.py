"""Functional collectives: tensor parallelism, DTensor and gradient clipping under FSDP2 use them.

C++ code issues them, without the process group's Python methods; `wait_tensor` waits at the first use of their result.
Code compiled by torch.compile calls neither; there only sequence numbers show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.collectives import Collectives, Issue, Wait, measure
from rankscope.probes.span import Arguments, Function, around
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline

# The function's names (the newer first): its operation, and the index of its group argument.
FUNCTIONS: dict[tuple[str, ...], tuple[str, int]] = {
    ("all_reduce",): ("all_reduce", 2),
    ("all_reduce_coalesced",): ("all_reduce", 2),
    ("broadcast",): ("broadcast", 2),
    ("all_gather_single", "all_gather_tensor"): ("all_gather", 2),
    ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"): ("all_gather", 1),
    ("reduce_scatter_single", "reduce_scatter_tensor"): ("reduce_scatter", 3),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"): ("reduce_scatter", 3),
    ("all_to_all_single",): ("all_to_all", 3),
}


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the module's functions, which callers look up in the module. Does nothing without torch.distributed."""
    if not dist.is_available():
        return []
    module, collectives = _module(), Collectives(timeline)
    watches = [replace(module, "wait_tensor", _wait(collectives, guard))]
    for names, (op, index) in FUNCTIONS.items():
        found = next((name for name in names if hasattr(module, name)), None)
        if found is not None:
            watches.append(replace(module, found, _issue(collectives, guard, layout.OPS.index(op), index)))
    return watches


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a pending result's storage. torch identifies it by that, because views wait too."""
    return tensor.untyped_storage().data_ptr()


def process_group(named: Any, tag: str = "") -> Any:
    """Return the process group of a collective's argument: a group, its name, a mesh, or a mesh's dimension."""
    if issubclass(type(named), dist.ProcessGroup):
        return named
    if issubclass(type(named), DeviceMesh):
        return named.get_group()
    if type(named) is tuple:
        return named[0].get_group(named[1])
    functional = _module()
    name = named if issubclass(type(named), str) else functional._resolve_group_name(named, tag)  # noqa: SLF001 - no public API
    return functional.c10d._resolve_process_group(name)  # noqa: SLF001 - likewise


def _module() -> Any:
    import torch.distributed._functional_collectives as module

    return module


def _issue(collectives: Collectives, guard: Guard, op: int, index: int) -> Callable[[Function], Function]:
    module = _module()

    def begin(args: Arguments, kwargs: dict[str, Any]) -> Issue | None:
        if module._are_we_tracing():  # noqa: SLF001 - as torch's code; tracing issues nothing
            return None
        named = kwargs["group"] if "group" in kwargs else args[index]
        return collectives.begin(process_group(named), op, collectives.groups.count_next)

    def end(call: Issue, args: Arguments, result: Any, _returned: bool) -> None:
        pending = result if type(result) is list else [result]
        waiting = [tensor for tensor in pending if type(tensor) is module.AsyncCollectiveTensor]
        key = storage_of(waiting[-1].elem) if waiting else None
        collectives.end_issue(call, op, measure(args[0]), key)

    return around(guard, begin, end)


def _wait(collectives: Collectives, guard: Guard) -> Callable[[Function], Function]:
    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Wait | None:
        tensor = args[0]
        if type(tensor) is not torch.Tensor:  # a compiler's tensor has no storage and does not wait
            return None
        return collectives.begin_wait(storage_of(tensor))

    def end(call: Wait, _args: Arguments, _result: Any, returned: bool) -> None:
        collectives.end_wait(call, returned)

    return around(guard, begin, end)
