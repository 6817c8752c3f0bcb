"""Classifying waits of the training thread's stream for another stream: for other ranks, for a batch, or unknown.

FSDP, HSDP, DeepSpeed, Megatron and many custom loops use separate streams for collectives and prefetched batches, and
the device waits for an event of such a stream (`wait_event`, `wait_stream`). A stream is classified by what the
training thread did in it: if it issued a collective, it is for communication; if it copied a batch, for copies.
"""

from __future__ import annotations

from typing import Any

from rankscope.record.layout import COLLECTIVE_WAIT, H2D_COPY

IDENTIFYING = (COLLECTIVE_WAIT, H2D_COPY)
MANY_EVENTS = 4096


class Streams:
    """The streams of a measured step. Streams are compared and hashed, as torch's."""

    def __init__(self) -> None:
        self.main: Any = None  # the stream in which the training thread computes
        self.are_watched = False  # this step is measured or the next one, which may wait for events of this one
        self.main_waits = False  # the main stream is about to wait, whichever stream is current
        self._phases: dict[Any, int] = {}  # the phase of a wait, by stream
        self._events: dict[int, int] = {}  # likewise, by the id of an event, updated at each record

    def begin_step(self, main: Any) -> None:
        """Begin to measure another step."""
        self.main = main
        if len(self._events) > MANY_EVENTS:  # most no longer exist
            self._events.clear()

    def note_stream(self, stream: Any, phase: int) -> None:
        """Note that `stream` is current while the training thread is in `phase`, one of IDENTIFYING."""
        if stream != self.main and self._phases.get(stream) != COLLECTIVE_WAIT:
            self._phases[stream] = phase

    def note_event(self, event: Any, stream: Any) -> None:
        """Note that `event` was recorded in `stream`."""
        phase = None if stream == self.main else self._phases.get(stream)
        if phase is not None:
            self._events[id(event)] = phase
        else:
            self._events.pop(id(event), None)

    def phase_of_wait(self, event: Any, stream: Any) -> int | None:
        """Return the phase of a wait of `stream` for `event`; None if unknown or not the main stream."""
        return self._events.get(id(event)) if stream == self.main else None

    def forget(self) -> None:
        """Forget everything: the device is no longer in use by this process."""
        self._phases.clear()
        self._events.clear()
        self.are_watched = False
