"""What a wait of the training thread's stream for another stream is: for other ranks, for a batch, or not known.

Collectives and prefetched batches have streams of their own in FSDP, HSDP, DeepSpeed, Megatron and many loops by hand;
what the device then waits for is an event out of such a stream (`wait_event`, `wait_stream`). Nobody says what a stream
is for. So it is known by the phase in which the training thread was met in it: one in which it issued a collective is
for communication, one in which it copied a batch is for copies.
"""

from __future__ import annotations

from typing import Any

from rankscope.record.layout import COLLECTIVE_WAIT, H2D_COPY

IDENTIFYING = (COLLECTIVE_WAIT, H2D_COPY)
MANY_EVENTS = 4096


class Streams:
    """Those of one step that is measured. Streams are compared and hashed, as torch's."""

    def __init__(self) -> None:
        self.main: Any = None  # the one in which the training thread computes
        self.are_watched = False  # a step is measured, or the next one is, in which events of this one are waited for
        self.main_waits = False  # the main stream is about to be made to wait, whichever stream is current
        self._phases: dict[Any, int] = {}  # by stream: what a wait for it is
        self._events: dict[int, int] = {}  # by the id of an event out of it, which is noted anew at each recording

    def begin_step(self, main: Any) -> None:
        """Another step is measured."""
        self.main = main
        if len(self._events) > MANY_EVENTS:  # most of them are gone
            self._events.clear()

    def met(self, stream: Any, phase: int) -> None:
        """The training thread is in `phase`, one of IDENTIFYING, with `stream` current."""
        if stream != self.main and self._phases.get(stream) != COLLECTIVE_WAIT:
            self._phases[stream] = phase

    def recorded(self, event: Any, stream: Any) -> None:
        """`event` was recorded in `stream`."""
        phase = None if stream == self.main else self._phases.get(stream)
        if phase is not None:
            self._events[id(event)] = phase
        else:
            self._events.pop(id(event), None)

    def phase_of_wait(self, event: Any, stream: Any) -> int | None:
        """What it is that `stream` waits for until `event`; None if that is not known, or it is not the main one."""
        return self._events.get(id(event)) if stream == self.main else None

    def forget(self) -> None:
        """The device is another process's."""
        self._phases.clear()
        self._events.clear()
        self.are_watched = False
