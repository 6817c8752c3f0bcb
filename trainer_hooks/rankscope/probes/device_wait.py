"""The host's waits for the device: synchronizations, and reads of its values.

These are `torch.cuda.synchronize`, a stream's and an event's `synchronize`, and `item`, `tolist` and `cpu` of a
device's tensor. Other waits (`if loss > 1`, an allocator out of memory, a full launch queue) stay in the phase around
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import Arguments, in_phase
from rankscope.probes.tensor_methods import Begin, End, TensorMethods
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

DEVICE_WAITS = INDEX["device_waits"]
METHODS = ("item", "tolist", "cpu")


def methods(timeline: Timeline) -> dict[str, tuple[Begin, bool]]:
    """Return the watched methods of a device's tensors, for `TensorMethods`."""

    def begin(_tensor: Any, _args: Arguments, _kwargs: dict[str, Any]) -> End:
        opened = timeline.enter(layout.DEVICE_WAIT)

        def end(_returned: bool) -> None:
            timeline.leave(opened)
            if opened:
                timeline.writer.slots[DEVICE_WAITS] += 1

        return end

    return dict.fromkeys(METHODS, (begin, False))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch them all; the tensors' methods once CUDA is in use. Does nothing in a CPU build of torch."""
    if not torch.backends.cuda.is_built():
        return []

    def count(_call: Arguments, _result: object) -> None:
        timeline.writer.slots[DEVICE_WAITS] += 1

    watch = in_phase(timeline, guard, layout.DEVICE_WAIT, count)
    # Newer torch has a device-agnostic module.
    agnostic = [torch.accelerator] if hasattr(torch, "accelerator") else []
    owners: list[Any] = [torch.cuda, torch.cuda.Stream, torch.cuda.Event, *agnostic]
    reads = TensorMethods(methods(timeline), guard, torch.cuda.is_initialized)
    return [
        *(replace(owner, "synchronize", watch) for owner in owners),
        reads.remove,
        timeline.steps.add_poll(guard(reads.poll)),
    ]
