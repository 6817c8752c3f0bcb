"""The script's phases of tasks that take turns on the training thread: of asyncio and trio, greenlets, generators.

A phase belongs to the task that opened it, and to those that this one starts inside it (`contextvars`). When another
task causes an event, the phases are set aside until their own task causes one. Otherwise a task that waits within
`evaluation` would absorb the training. There is no event when a task begins to wait, so the time until the next event
is still charged to the phase.

A generator that yields within a phase is outside of it until it is resumed. It has no context of its own, but its frame
shows it. Not the generator of a context manager: the phase is for the body of that one's `with` statement.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from contextvars import ContextVar
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.timeline.phases import PhaseClock, Phases

CALLERS = 5  # frames from a `with` statement to `generator_frame`: contextlib's, api.py's, the guard's, script.py's
GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class TaskPhase:
    """An open phase of a task, and the one around it. `frame` is the generator's, if it was opened in one."""

    __slots__ = ("around", "depth", "frame", "phase")

    def __init__(self, phase: int, depth: int, around: TaskPhase | None, frame: FrameType | None) -> None:
        self.frame = frame
        self.phase = phase
        self.depth = depth  # number of open phases up to this one, when it was last open
        self.around = around


INNERMOST: ContextVar[TaskPhase | None] = ContextVar("rankscope_innermost_phase", default=None)
"""The innermost phase of the running task. It may be closed already, by another task."""


def generator_frame() -> FrameType | None:
    """Return the frame whose `with` statement enters a phase if it is a generator's; None for other frames."""
    try:
        frame = sys._getframe(CALLERS)  # noqa: SLF001 - the documented name
    except ValueError:  # not called through api.py
        return None
    if not frame.f_code.co_flags & GENERATOR:
        return None
    resumed_by = frame.f_back
    is_manager = resumed_by is None or resumed_by.f_code.co_filename == contextlib.__file__
    return None if is_manager else frame


def may_take_turns() -> bool:
    """Return whether the calling code may be a task that waits while others run on its thread."""
    asyncio = sys.modules.get("asyncio.events")
    in_loop = asyncio is not None and asyncio._get_running_loop() is not None  # noqa: SLF001 - never raises
    return in_loop or "greenlet" in sys.modules or "trio" in sys.modules


class TaskPhases:
    """The phases of all tasks, and those of the task that caused the last event."""

    def __init__(self, phases: PhaseClock) -> None:
        self._phases = phases
        self.restart()

    def restart(self) -> None:
        """Forget all of them."""
        self.open: set[TaskPhase] = set()  # also those that are set aside
        self._current: TaskPhase | None = None  # the innermost one that is not set aside
        self._around = 0  # number of phases around those

    def add(self, opened: Phases, frame: FrameType | None = None) -> TaskPhase:
        """Let the phase that was just opened belong to the running task. Pass the result to `end`."""
        depth = len(levels(opened))
        if self._current is None:
            self._around = depth - 1
        around = INNERMOST.get()
        while around is not None and around not in self.open:
            around = around.around
        self._current = added = TaskPhase(opened[0], depth, around, frame)
        self.open.add(added)
        INNERMOST.set(added)
        self._phases.find_usual_owner()
        return added

    def end(self, ended: TaskPhase) -> Phases | None:
        """Return the open phase that is to be left now; None if it is closed already."""
        if ended not in self.open:
            return None
        self._show(ended)
        opened = levels(self._phases.open_phases)[-ended.depth]
        self.open.discard(ended)
        ended.frame = None
        self._current = self._open_one(ended.around)
        if INNERMOST.get() is ended:
            INNERMOST.set(ended.around)
        return opened

    def switch(self) -> None:
        """Set aside the phases of other tasks than the running one, and open this one's again."""
        if get_ident() == self._phases.owner:
            self._show(self._innermost())

    def _innermost(self) -> TaskPhase | None:
        return self._open_one(INNERMOST.get())

    def _open_one(self, phase: TaskPhase | None) -> TaskPhase | None:
        """Return the innermost phase from `phase` outwards that is open and whose generator runs."""
        while phase is not None and (phase not in self.open or (phase.frame and phase.frame.f_back is None)):
            phase = phase.around
        return phase

    def _show(self, innermost: TaskPhase | None) -> None:
        if innermost is self._current:
            return
        if self._current is not None:
            self._phases.close(self._around)
        self._current, chain = innermost, []
        while innermost is not None:
            chain.append(innermost)
            innermost = self._open_one(innermost.around)
        self._around = len(levels(self._phases.open_phases))
        for phase in reversed(chain):
            phase.depth = len(levels(self._phases.reopen(phase.phase)))


def levels(phases: Phases | None) -> list[Phases]:
    """Return the open phases as seen from each of them, the innermost first."""
    found = []
    while phases is not None:
        found.append(phases)
        phases = phases[1]
    return found
