"""The probes, one file each: they watch torch and enter the phases.

A probe is a module with `install(timeline, guard)`, which returns the functions that undo it. Register it below.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

PROBES = (  # in order of installation
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
LATE_PROBES = ("frameworks",)  # installed when the training begins, because frameworks are imported after the hook


def all_probes() -> dict[str, ModuleType]:
    """Return the probes that `instrument` installs, by name. Imports torch."""
    return _modules(PROBES)


def late_probes() -> dict[str, ModuleType]:
    """Return the probes that are installed when the training begins, by name."""
    return _modules(LATE_PROBES)


def _modules(names: Sequence[str]) -> dict[str, ModuleType]:
    return {name: import_module(f"{__name__}.{name}") for name in names}
