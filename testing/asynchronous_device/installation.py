"""Install the device where torch, FSDP2 and the hook look for CUDA, and remove it without a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from testing.asynchronous_device import process_group, streams
from testing.asynchronous_device.process_group import BACKEND

MEMORY_BYTES = 80 * 2**30


def replacements() -> list[tuple[Any, str, Any]]:
    """Return owner, name and value of each attribute that is replaced."""
    owner = os.getpid()
    ours: list[tuple[Any, str, Any]] = [(torch.accelerator, "current_stream", streams.current_stream)]
    for module in (torch.cuda, torch.cpu):
        ours += [
            (module, "Stream", streams.Stream),
            (module, "Event", streams.Event),
            (module, "current_stream", streams.current_stream),
            (module, "stream", streams.stream),
            (module, "synchronize", streams.synchronize),
        ]
    ours += [
        (torch.cuda, "is_initialized", lambda: os.getpid() == owner),  # not in a forked child
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda _device=None: properties()),
        (torch.cuda, "memory_stats_as_nested_dict", lambda _device=None: {}),
        (torch.backends.cuda, "is_built", lambda: True),
    ]
    group, work = dist.ProcessGroup, dist.Work
    ours += [(group, name, process_group.method_for_python(name, getattr(group, name)))
             for name in process_group.FILLS if hasattr(group, name)]  # fmt: skip
    wrappers = (process_group.wait, process_group.is_completed, process_group.get_future)
    return ours + [(work, wrap.__name__, wrap(getattr(work, wrap.__name__))) for wrap in wrappers]


def properties() -> SimpleNamespace:
    """Return the device's properties, with the rank's UUID where CUDA_VISIBLE_DEVICES has UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    uuid = visible[local_rank] if local_rank < len(visible) else ""
    return SimpleNamespace(name="asynchronous device", uuid=uuid, total_memory=MEMORY_BYTES)


@contextmanager
def asynchronous_device(on_transfer: Callable[[], None] | None = None) -> Iterator[None]:
    """Give torch the device, and torch.distributed the backend `BACKEND` on it, until the block ends.

    Enter it before the hook is installed, and leave it after the hook is removed. `on_transfer` is called in every
    collective once all ranks are there, in the thread of its stream: its sleep is the network's time.
    """
    with ExitStack() as undo:
        undo.callback(streams.stop_all)
        if on_transfer is not None:
            process_group.on_transfer.append(on_transfer)
            undo.callback(process_group.on_transfer.clear)
        register()
        undo.callback(unregister)
        for owner, name, ours in replacements():
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, ours)
        yield


def register() -> None:
    dist.Backend.register_backend(BACKEND, process_group.create, devices=["cpu"])


def unregister() -> None:
    """Undo `register`. torch has no inverse of its own."""
    backend: Any = dist.Backend
    delattr(backend, BACKEND.upper())
    backend.backend_list.remove(BACKEND)
    for known in (backend.backend_type_map, backend.backend_capability):
        known.pop(BACKEND)
    backend._plugins.pop(BACKEND.upper())
