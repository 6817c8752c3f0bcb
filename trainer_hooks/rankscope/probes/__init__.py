"""The probes, one file each: what is watched in torch, and which phase it means.

A probe is a module with `install(timeline, guard)`, which returns what takes everything back. These lists are the
registration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from rankscope.guard import Guard
from rankscope.timeline.timeline import Timeline

Install = Callable[[Timeline, Guard], Sequence[Callable[[], None]]]


def all_probes() -> dict[str, ModuleType]:
    """Every probe by name. Imports torch."""
    from rankscope.probes import (
        amp,
        autocast,
        backward,
        checkpoint,
        collectives,
        cuda_memory,
        data_wait,
        ddp,
        device_time,
        device_wait,
        forward,
        functional,
        garbage,
        h2d_copy,
        loader_workers,
        optimizer,
    )

    return {
        "data_wait": data_wait,
        "loader_workers": loader_workers,
        "ddp": ddp,
        "forward": forward,
        "backward": backward,
        "collectives": collectives,
        "functional": functional,
        "optimizer": optimizer,
        "device_time": device_time,
        "device_wait": device_wait,
        "checkpoint": checkpoint,
        "garbage": garbage,
        "h2d_copy": h2d_copy,
        "cuda_memory": cuda_memory,
        "autocast": autocast,
        "amp": amp,
    }


def late_probes() -> dict[str, ModuleType]:
    """Those that are installed when the training begins, because what they watch is imported only after us."""
    from rankscope.probes import frameworks

    return {"frameworks": frameworks}
