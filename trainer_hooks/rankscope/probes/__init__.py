"""The probes, one file each: what is watched in torch, and which phase it means.

A probe is a module with `install(timeline, guard)`, which returns what takes everything back. These lists are the
registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

PROBES = (  # in the order in which they are installed
    "data_wait",
    "dispatched_batches",
    "shared_batches",
    "loader_workers",
    "process_group",
    "ddp",
    "forward",
    "backward",
    "collectives",
    "functional",
    "optimizer",
    "device_time",
    "device_wait",
    "checkpoint",
    "garbage",
    "h2d_copy",
    "cuda_memory",
    "autocast",
    "amp",
)
LATE_PROBES = ("frameworks",)  # when the training begins, because what they watch is imported only after us


def all_probes() -> dict[str, ModuleType]:
    """Those that `instrument` installs, by name. Imports torch."""
    return _modules(PROBES)


def late_probes() -> dict[str, ModuleType]:
    """Those that are installed when the training begins, by name."""
    return _modules(LATE_PROBES)


def _modules(names: Sequence[str]) -> dict[str, ModuleType]:
    return {name: import_module(f"{__name__}.{name}") for name in names}
