"""The default process group: its creation, replacement and destruction, and the name of a mesh that uses it.

torch describes the groups of a device mesh by the names of their dimensions, but not the default group, which a mesh
with one dimension uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import Arguments, around
from rankscope.timeline.timeline import Timeline

DESTROY_FUNCTION = "destroy_process_group"


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the function with which torch sets the default group. An abort is not the end of the work."""
    if not dist.is_available():
        return []
    from torch.distributed import distributed_c10d

    notice = guard(lambda exists: timeline.groups.on_default(exists))

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(pg: Any) -> None:
            original(pg)
            if guard.disabled:
                return
            if pg is not None or sys._getframe(1).f_code.co_name == DESTROY_FUNCTION:  # noqa: SLF001 - the documented name
                notice(pg is not None)

        return watched

    def describe(_call: bool, args: Arguments, _result: None, returned: bool) -> None:
        mesh = args[0]
        if returned and mesh.mesh_dim_names and mesh.ndim == 1 and mesh.size() == dist.get_world_size() > 1:
            timeline.groups.describe_default(f"mesh_{mesh.mesh_dim_names[0]}")

    watch_mesh = around(guard, lambda _args, _kwargs: dist.is_initialized(), describe)
    return [
        replace(distributed_c10d, "_update_default_pg", wrap),
        replace(DeviceMesh, "__init__", watch_mesh),
    ]
