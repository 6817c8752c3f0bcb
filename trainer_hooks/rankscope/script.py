"""What a training script says of itself: named phases, the ends of steps, and iterators of batches (see api.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rankscope.guard import Guard, logger
from rankscope.record import layout
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import SCRIPT
from rankscope.timeline.timeline import Timeline


class Script:
    """Applies the script's calls to the timeline. `phases` are the names of the script's own phases."""

    def __init__(self, timeline: Timeline, guard: Callable[[str], Guard], on_new_phase: Callable[[], object]) -> None:
        self.phases: list[str] = []
        self._timeline = timeline
        self._on_new_phase = on_new_phase
        self._phases_are_full = False
        phase, self._timed = guard("phase"), guard("timed")
        self.enter_phase = phase(self._enter_phase)
        self.leave_phase = phase(self._leave_phase)
        self.step = phase(self._step)
        self.timed = self._timed(self._watch_iterator)

    def _phase_index(self, name: str) -> int:
        """Return the index of a phase, one of the record's own or the script's; OTHER once there are too many."""
        name = str(name)
        names = [*layout.PHASES, *self.phases]
        if name in names:
            return names.index(name)
        if len(names) == layout.MAX_PHASES:
            if not self._phases_are_full:
                logger.warning("rankscope: no place for phase %r: %d are in use", name, layout.MAX_PHASES)
            self._phases_are_full = True
            return layout.OTHER
        self.phases.append(name)
        self._on_new_phase()
        return len(names)

    def _enter_phase(self, name: str) -> Phases | None:
        index = self._phase_index(name)
        return self._timeline.checkpoints.begin() if index == layout.CHECKPOINT else self._timeline.enter(index)

    def _leave_phase(self, name: str, opened: Phases | None, succeeded: bool) -> None:
        if opened is None:
            return
        if str(name) == layout.PHASES[layout.CHECKPOINT]:
            self._timeline.checkpoints.end(opened, 0.0 if succeeded else None)
        else:
            self._timeline.leave(opened)

    def _step(self, samples: float | None, tokens: float | None) -> None:
        timeline = self._timeline
        if timeline.steps.marker != SCRIPT and not timeline.steps.take_over(SCRIPT):
            return  # the backward pass before it was this step
        if samples is not None:
            timeline.steps.fetched_samples = float(samples)
        if tokens is not None:
            timeline.steps.fetched_tokens = float(tokens)
        timeline.step()

    def _watch_iterator(self, iterator: Iterator[Any]) -> Iterator[Any]:
        from rankscope.probes import data_wait

        return data_wait.timed(self._timeline, self._timed, iterator)
