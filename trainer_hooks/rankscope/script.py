"""The calls of a training script: its own phases, the ends of steps, and iterators of batches (see api.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rankscope.guard import Guard, logger
from rankscope.record import layout
from rankscope.record.text import LABEL_LIMIT, is_name, replace_unprintable
from rankscope.record.writer import encode_info
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import SCRIPT
from rankscope.timeline.task_phases import TaskPhase, generator_frame, may_take_turns
from rankscope.timeline.timeline import Timeline

SHOWN = 40  # characters of a refused name in a warning


class Script:
    """Applies the script's calls to the timeline. `phases` are the names of the script's own phases."""

    def __init__(
        self,
        timeline: Timeline,
        guard: Callable[[str], Guard],
        on_new_phase: Callable[[], object],
        on_failed_phase: Callable[[int, BaseException | None], object] = lambda _phase, _error: None,
    ) -> None:
        self.phases: list[str] = []
        self._on_failed_phase = on_failed_phase
        self._timeline = timeline
        self._on_new_phase = on_new_phase
        self._refusals: set[str] = set()  # logged already
        phase, self._timed = guard("phase"), guard("timed")
        self.enter_phase = phase(self._enter_phase)
        self.leave_phase = phase(self._leave_phase)
        self.step = guard("step")(self._step)
        self.timed = self._timed(self._watch_iterator)

    def _phase_index(self, name: str) -> int:
        """Return the index of a built-in phase or one of the script's; OTHER if its name is refused."""
        names = [*layout.PHASES, *self.phases]
        if name in names:
            return names.index(name)
        if refusal := self._refusal(name):
            self._log_refusal(name, refusal)
            return layout.OTHER
        self.phases.append(name)
        self._on_new_phase()
        return len(names)

    def _refusal(self, name: str) -> str:
        """Return why a new name is refused; empty if it is not."""
        if not is_name(name):
            return f"a name has 1 to {LABEL_LIMIT} printable characters"
        if len(layout.PHASES) + len(self.phases) == layout.MAX_PHASES:
            return f"all {layout.MAX_PHASES} phases are in use"
        if len(encode_info([*self.phases, name])) > layout.PHASE_NAMES_CAPACITY:
            return f"the names take more than {layout.PHASE_NAMES_CAPACITY} bytes"
        return ""

    def _log_refusal(self, name: str, refusal: str) -> None:
        """Log the first refused name for each reason."""
        if refusal not in self._refusals:
            shown = replace_unprintable(name, SHOWN)
            logger.warning("rankscope: cannot record phase %r: %s; its time counts as other", shown, refusal)
        self._refusals.add(refusal)

    def _enter_phase(self, name: object) -> Phases | TaskPhase | None:
        index, timeline = self._phase_index(_text(name)), self._timeline
        opened = timeline.checkpoints.begin() if index == layout.CHECKPOINT else timeline.enter(index)
        frame = generator_frame()
        return timeline.tasks.add(opened, frame) if opened and (frame or may_take_turns()) else opened

    def _leave_phase(self, entered: Phases | TaskPhase | None, succeeded: bool) -> None:
        opened = self._timeline.tasks.end(entered) if isinstance(entered, TaskPhase) else entered
        if opened is None:
            return
        if not succeeded:
            self._on_failed_phase(opened[0], sys.exc_info()[1])
        if opened[0] == layout.CHECKPOINT:
            self._timeline.checkpoints.end(opened, 0.0 if succeeded else None)
        else:
            self._timeline.leave(opened)

    def _step(self, samples: object, tokens: object) -> None:
        timeline = self._timeline
        if timeline.steps.marker != SCRIPT and not timeline.steps.take_over(SCRIPT):
            return  # the last backward pass has already counted as this step
        if samples is not None or tokens is not None:
            timeline.steps.set_counts(self._number("samples", samples), self._number("tokens", tokens))
        timeline.step()

    def _number(self, name: str, value: object) -> float | None:
        return None if value is None else self._timeline.numbers.accept(name, value)

    def _watch_iterator(self, iterator: Iterator[Any]) -> Iterator[Any]:
        from rankscope.probes import data_wait

        return data_wait.timed(self._timeline, self._timed, iterator)


def _text(name: object) -> str:
    """Return the name as text; empty if its type raises."""
    try:
        return str(name)
    except Exception:  # a type of the script may raise anything
        return ""
