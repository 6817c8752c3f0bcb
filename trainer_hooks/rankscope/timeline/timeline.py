"""The timeline of a training thread: its phases, steps, collectives and checkpoints, written directly to the record.

Steps, groups and checkpoints are separate objects (steps.py, groups.py, checkpoints.py). The phases are the timeline
itself (phases.py), because every probe enters and leaves them, and an indirection would add time to each event. Each
object may have at most 29 attributes: with a 30th, CPython 3.11 moves all of them to a slower dictionary.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

from rankscope.foreign import attribute, own_attribute
from rankscope.process.identity import device_in_use
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.checkpoints import CheckpointCounter
from rankscope.timeline.groups import Groups
from rankscope.timeline.phases import PhaseClock
from rankscope.timeline.script_numbers import ScriptNumbers
from rankscope.timeline.steps import Steps


class BackwardPasses:
    """The running outermost backward pass: nested passes, and callbacks at its end."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the passes that ran in the parent of this process."""
        self.nested = 0  # passes running inside it
        self.on_optimizer_steps: Callable[[], object] | None = None  # called at its end if optimizers stepped in it
        self.on_end: Callable[[], object] | None = None  # called once at its end


class Job:
    """Objects of the job that the probes have seen. The settings are read from these."""

    def __init__(self) -> None:
        self.objects: dict[str, Callable[[], Any]] = {}  # weak references, by role
        self.device: int | None = None  # index of the CUDA device of the trained parameters
        # Copies the counters of the device's allocator to the record.
        self.read_allocator: Callable[[], object] = lambda: None
        self.autocast = ""  # the data type of the last autocast
        self.model: Callable[[], Any] = lambda: None  # weak reference to a module that trains in training mode
        self.last_model: Callable[[], Any] = lambda: None  # likewise, even if it then had a pass in evaluation mode
        self.repeats_batches = False  # whether the loader fetches a batch again for each of its parts

    def keep_optimizer(self, optimizer: Any) -> None:
        """Keep the optimizer that marks the steps, and the CUDA device of its parameters, if they are on one."""
        self.objects["optimizer"] = weakref.ref(optimizer)
        groups = getattr(optimizer, "param_groups", ())
        devices = {parameter.device for group in groups for parameter in islice(group["params"], 1)}
        if indices := {device.index for device in devices if device.type == "cuda"}:
            self.device = device_in_use(indices)

    def is_evaluating(self) -> bool:
        """Return whether the trained module is in evaluation mode."""
        return is_in_evaluation_mode(self.model())

    def is_in_evaluation_mode(self) -> bool:
        """Return the same, even if there have been passes with gradients in evaluation mode (adversarial examples)."""
        return is_in_evaluation_mode(self.last_model())


def is_in_evaluation_mode(module: Any) -> bool:
    """Return whether the module, if there is one, is in evaluation mode."""
    return module is not None and not is_in_training_mode(module)


def is_in_training_mode(module: Any) -> bool:
    """Return whether a module is in training mode. A property of the script is not asked, torch.compile's is."""
    stored = own_attribute(module, "training")
    value = attribute(module, "training") if stored is None else stored
    return type(value) in (bool, int) and bool(value)


class Timeline(PhaseClock):
    """The phases, steps and collectives of one thread: the main thread, until another thread makes a step.

    Events of other threads are ignored, so that the record has a single writer. While `on_event` is set, the record is
    not published yet: that happens at the first event that shows that this process trains.
    """

    def __init__(self, writer: RankWriter, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(writer, clock)
        self.groups = Groups(writer)
        self.steps = Steps(self, self.groups)
        self.backward = BackwardPasses()
        self.checkpoints = CheckpointCounter(self)
        self.job = Job()
        self.numbers = ScriptNumbers()
        self.restart()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty stand-in, as `Guard.__reduce__` does."""
        return SimpleNamespace, ()

    def restart(self) -> None:
        """Start over with an empty record in the calling process, in the phase startup."""
        slots = self.slots
        for index in range(layout.SLOTS):
            slots[index] = 0.0
        super().restart()
        slots[INDEX["started_monotonic"]] = self.last_event
        slots[INDEX["started_unix"]] = time.time()
        self.groups.restart()
        self.steps.restart()
        self.backward.restart()
        self.checkpoints.restart()

    def step(self, number: int = 1) -> None:
        """End a step on the calling thread. The first step ends startup. `number` as in `Steps.end`."""
        if self._owner is None:
            return
        if self._on_event is not None:
            self._on_event(layout.OPTIMIZER)
        self.adopt()
        if self.tasks.open:
            self.tasks.switch()
        self._pass()
        self.steps.end(number)

    def stop(self) -> None:
        """Ignore all events from now on. Also stop calling the device, which a forked child must not do."""
        super().stop()
        self.steps.on_end = None
