"""Mixed precision with a GradScaler: its scale, and the optimizer steps that it skipped.

Skipped steps are found without waiting for a device. For most optimizers the scaler decides on the host and does not
call `optimizer.step`. A fused optimizer is always called and decides on the device. Its decisions and the scale are
copied to the host asynchronously, at most once a second, and read when the copy is complete.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rankscope.foreign import attribute, own_attribute
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

SCALE, SKIPPED = INDEX["amp_scale"], INDEX["amp_skipped_steps"]
READ_SECONDS = 1.0  # between two reads of a device
MAX_UNREAD = 256  # decisions not read yet; past that the device is read before the second is over


class DeviceReading:
    """The scale and the skipped steps of a CUDA device, copied to the host about a second later, without waiting."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._host = torch.zeros(2, pin_memory=True)
        self._copied: Any = None  # a CUDA event, which torch does not type
        self._decisions: list[torch.Tensor] = []
        self._next = clock()

    def add(self, decisions: Iterable[torch.Tensor]) -> None:
        """Add the decision of a fused optimizer, one number per device: nonzero if it skipped the step."""
        self._decisions += [decision.to(self._device, non_blocking=True) for decision in decisions]

    def take(self) -> tuple[float, float] | None:
        """Return the scale and the number of skipped steps since the last call; None while no copy is complete."""
        if self._copied is None or not self._copied.query():
            return None
        self._copied = None
        scale, skipped = self._host.tolist()
        return scale, skipped

    def request(self, scale: torch.Tensor) -> None:
        """Start a copy from the device in the current stream, if one is due."""
        is_due = self._clock() >= self._next or len(self._decisions) >= MAX_UNREAD
        if self._copied is not None or not is_due:
            return
        self._next = self._clock() + READ_SECONDS
        skipped = torch.stack(self._decisions).count_nonzero() if self._decisions else torch.zeros_like(scale)
        self._decisions.clear()
        self._host.copy_(torch.stack([scale.double(), skipped.double()]), non_blocking=True)
        self._copied = torch.cuda.current_stream(self._device).record_event()


class ScalerWatch:
    """Records what each call of `GradScaler.step` did."""

    def __init__(self, timeline: Timeline, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self._clock = clock
        self._begun: set[int] = set()  # optimizers whose step was called, by id
        # Possibly skipped steps of optimizers whose hooks have not run yet: not all optimizers call their hooks.
        self._unsure: dict[int, int | None] = {}  # by the optimizer's id; None: it calls its hooks
        self._readings: dict[torch.device, DeviceReading] = {}

    def begin(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """Note that an optimizer's step begins, so the scaler did not skip it. A hook of every optimizer."""
        if not is_dynamo_compiling():
            self._begun.add(id(optimizer))

    def count_skipped(self, call: tuple[Any, ...], _result: object) -> None:
        """Count the steps skipped by `scaler.step(optimizer)`, which has returned, and read the scale."""
        scaler: Any = call[0]
        optimizer = call[1] if len(call) > 1 else None
        if optimizer is None or not own_attribute(scaler, "_enabled"):
            return
        state = own_attribute(scaler, "_per_optimizer_states").get(id(optimizer), {})
        scale = own_attribute(scaler, "_scale")  # its get_scale() waits for the device
        if state.get("stage") is not OptState.STEPPED or type(scale) is not torch.Tensor:
            return  # it raised
        decided = state["found_inf_per_device"].values()
        if attribute(optimizer, "_step_supports_amp_scaling") is not True:
            self._count(self._skipped(optimizer))
            decided = ()
        self._read(scale, decided)

    def _skipped(self, optimizer: Optimizer) -> int:
        """Return how many steps are now known to have been skipped."""
        key = id(optimizer)
        if key not in self._unsure:
            self._unsure[key] = 0
            weakref.finalize(optimizer, self._unsure.pop, key, None).atexit = False  # before its id is reused
        unsure = self._unsure[key]
        if key in self._begun:
            self._begun.discard(key)
            self._unsure[key] = None
            return unsure or 0
        if unsure is None:
            return 1
        self._unsure[key] = unsure + 1
        return 0

    def _read(self, scale: torch.Tensor, decided: Iterable[torch.Tensor]) -> None:
        if scale.device.type == "cpu":
            self._show(scale.item())
            self._count(any(decision.item() for decision in decided))
        elif scale.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._read_device(scale, decided)

    def _read_device(self, scale: torch.Tensor, decided: Iterable[torch.Tensor]) -> None:
        reading = self._readings.get(scale.device)
        if reading is None:
            self._readings[scale.device] = reading = DeviceReading(scale.device, self._clock)
        reading.add(decided)
        if arrived := reading.take():
            self._show(arrived[0])
            self._count(arrived[1])
        reading.request(scale)

    def _show(self, scale: float) -> None:
        self._timeline.writer.slots[SCALE] = self._timeline.numbers.accept("the loss scale", scale)

    def _count(self, skipped: float) -> None:
        self._timeline.writer.slots[SKIPPED] += skipped


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch `GradScaler.step`, and the optimizers once a scaler is in use."""
    watch = ScalerWatch(timeline)
    handles: list[RemovableHandle] = []
    begin: Any = guard(watch.begin)

    def remove_handles() -> None:
        for handle in handles:
            handle.remove()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # Unscaling, and the wait for its result, belong to the optimizer's time.
        watched = in_phase(timeline, guard, layout.OPTIMIZER, watch.count_skipped)(original)

        def step(*args: Any, **kwargs: Any) -> Any:
            if not (handles or guard.disabled):
                handles.append(register_optimizer_step_pre_hook(begin))
            return watched(*args, **kwargs)

        return step

    return [replace(GradScaler, "step", make), remove_handles]
