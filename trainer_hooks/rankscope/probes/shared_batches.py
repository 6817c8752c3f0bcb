"""Ranks that train on the same batches, as under tensor, sequence, context and pipeline parallelism.

The job's device meshes show them: the ranks along such a dimension share their batches, and the first of them counts
them. A dimension is recognized by its name; in a mesh without names, by the placement of parameters. In a job that
splits its model without a device mesh, each rank counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankscope.foreign import attribute, is_known
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import Arguments, around
from rankscope.settings import parameters
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline

# Words in the name of a dimension, such as `dp_shard`.
SHARING = frozenset({"tp", "sp", "cp", "pp", "mp", "tensor", "sequence", "seq", "context", "pipeline", "pipe", "model"})
DIVIDING = frozenset({"dp", "ddp", "fsdp", "hsdp", "replicate", "shard", "data", "batch", "ep", "expert"})


class Meshes:
    """The device meshes that the job has made."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._meshes: list[weakref.ref[DeviceMesh]] = []

    def add(self, _call: bool, args: Arguments, _result: None, returned: bool) -> None:
        """Remember a new mesh."""
        if returned:
            self._meshes.append(weakref.ref(args[0]))

    def poll(self) -> None:
        """Find out during the first steps whether another rank counts the batches."""
        steps = self._timeline.steps
        if steps.count > SETTLED_STEPS or steps.shares_batches:
            return
        optimizer = self._timeline.job.objects.get("optimizer")
        if any(map(shares_batches, self._living())) or is_tensor_parallel(optimizer() if optimizer else None):
            steps.share_batches()

    def _living(self) -> list[DeviceMesh]:
        return [mesh for reference in self._meshes if (mesh := reference()) is not None]


def shares_batches(mesh: DeviceMesh) -> bool:
    """Return whether this rank shares the batches of an earlier rank along a dimension of the mesh."""
    coordinate = mesh.get_coordinate() or ()
    return any(map(is_sharing, mesh.mesh_dim_names or (), coordinate))


def is_sharing(name: str, position: int) -> bool:
    """Return whether a rank at this position of the dimension shares the batches of the first one."""
    words = set(name.lower().split("_"))
    return position > 0 and not words.isdisjoint(SHARING) and words.isdisjoint(DIVIDING)


def is_tensor_parallel(optimizer: Any) -> bool:
    """Return whether parameters on a mesh without names are placed by tensor parallelism, not by FSDP."""
    return any(map(_is_placed, parameters(optimizer)))


def _is_placed(parameter: Any) -> bool:
    mesh = attribute(parameter, "device_mesh") if is_known(type(parameter)) else None
    if mesh is None or mesh.mesh_dim_names or mesh.ndim != 1 or not mesh.get_local_rank():
        return False
    return not parameter.placements[0].is_shard(0)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Note each device mesh, and check them in the first steps."""
    if not dist.is_available():
        return []
    meshes = Meshes(timeline)
    note = around(guard, lambda _args, _kwargs: True, meshes.add)
    return [timeline.steps.add_poll(guard(meshes.poll)), replace(DeviceMesh, "__init__", note)]
