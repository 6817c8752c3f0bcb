"""One training thread's timeline: its phases, steps, collectives and checkpoints, written straight into the record.

Each concern has an object of its own (steps.py, groups.py, checkpoints.py); the phases are the timeline itself
(phases.py), because every probe enters and leaves them and a hop more would be one at each event. Those objects may
have 29 attributes each: CPython 3.11 keeps the 30th, and with it all the others, in a slower dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.checkpoints import CheckpointCounter
from rankscope.timeline.groups import Groups
from rankscope.timeline.phases import PhaseClock
from rankscope.timeline.script_numbers import ScriptNumbers
from rankscope.timeline.steps import Steps


class BackwardPasses:
    """What happens within the outermost backward pass that is running, and at its end."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the passes that ran in the process that this one was forked from."""
        self.nested = 0  # passes that run within it
        self.on_optimizer_steps: Callable[[], object] | None = None  # called once if optimizers have stepped in it
        self.on_end: Callable[[], object] | None = None  # called once when it has ended


class Job:
    """What the probes have met of the job, for those who want to know it: its settings are read from these."""

    def __init__(self) -> None:
        self.objects: dict[str, Callable[[], Any]] = {}  # weak references, by role
        self.autocast = ""  # the type that autocast was last entered with
        self.model: Callable[[], Any] = lambda: None  # a weak reference to a module that trains in training mode

    def is_evaluating(self) -> bool:
        """Whether the module that trains is in evaluation mode."""
        model = self.model()
        return model is not None and not model.training


class Timeline(PhaseClock):
    """Phases, steps and collectives of one thread: the main thread, until a step happens on another.

    Events of other threads are ignored, so that the record keeps its single writer. While `on_event` is set the
    record is not published yet: it is at the first event that tells that this process trains.
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
        """A stand-in without anything, as `Guard.__reduce__` explains."""
        return SimpleNamespace, ()

    def restart(self) -> None:
        """Begin again from nothing, in start-up, as the calling process."""
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
        """The end of a step, on the thread that trains. The first one ends start-up. `number` as in `Steps.ended`."""
        if self._owner is None:
            return
        if self._on_event is not None:
            self._on_event(layout.OPTIMIZER)
        self.adopt()
        self._pass()
        self.steps.ended(number)

    def stop(self) -> None:
        """Ignore every event from now on; ask nothing of the device either, which a forked child may not do."""
        super().stop()
        self.steps.on_end = None
