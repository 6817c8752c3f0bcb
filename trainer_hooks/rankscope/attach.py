"""`instrument()` and its exact inverse: from the first training event to a published record."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rankscope import guard, probes
from rankscope.announcements import Announcer
from rankscope.guard import Guard, logger
from rankscope.patch import Undo
from rankscope.process import forks, identity
from rankscope.process.ending import Ending
from rankscope.process.environment import number
from rankscope.process.stack_dump import StackDump
from rankscope.record import layout
from rankscope.record.directory import opened, weakness
from rankscope.record.old_records import remove_old_records
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import RankWriter, run_directory
from rankscope.settings import Settings
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import SCRIPT
from rankscope.timeline.timeline import Timeline

ERROR_LIMIT = 200  # characters of a path or an error: a path may have thousands

# Events after which a process without a process group is surely training. Fetching data is none of them: a
# distributed script may look at its data before it knows its rank.
TRAINING_EVENTS = frozenset({layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER})

STEPS_WITHOUT_GROUP = 20  # a warm-up before init_process_group is shorter


class Attachment:
    """Everything that Rankscope has put into this process: one timeline, one record, the probes."""

    def __init__(self) -> None:
        self.writer = RankWriter()
        self.timeline = Timeline(self.writer)
        self._announcer = Announcer(self.timeline, self._full_info)
        announcements = self._guard("announcements")
        self._poll_announcer = announcements(self._announcer.poll)
        self._ending = Ending(self.writer, announcements(self._announcer.end))
        self._stack_dump = StackDump()
        self._info: dict[str, Any] = {}
        self._phases: list[str] = []
        self._phases_are_full = False
        self._disabled: list[str] = []
        self._undo: list[Undo] = []
        self._settings = Settings(self.timeline, self._refresh)
        phases = self._guard("phase")
        self.enter_phase = phases(self._enter_phase)
        self.leave_phase = phases(self._leave_phase)
        self.step = phases(self._explicit_step)
        self._timed = self._guard("timed")
        self.timed = self._timed(self._watch_iterator)

    def install(self) -> None:
        """Install every probe; one that cannot be installed is off, the others work."""
        from rankscope.probes.compiler import skip_package, uncompiled  # as the probes, with torch

        self.timeline.on_event = uncompiled(self._guard("record")(self._on_event))
        self.timeline.groups.on_new = uncompiled(self._refresh)
        for name, probe in probes.all_probes().items():
            self._install(name, probe)
        skip_package()
        self.timeline.steps.polls.append(self._guard("settings")(self._settings.poll))
        self.timeline.steps.polls.append(self._poll_announcer)
        self._ending.watch()

    def _install(self, name: str, probe: ModuleType) -> None:
        fuse = self._guard(name)
        self._undo.extend(fuse(probe.install)(self.timeline, fuse) or [])

    def _guard(self, name: str) -> Guard:
        return Guard(name, self._on_probe_failure, self.timeline.unwind)

    def remove(self) -> None:
        """Restore every patched object, end the record as finished and stop counting."""
        self.timeline.stop()
        for undo in reversed(self._undo):
            _take_back(undo)
        self._undo.clear()
        self._ending.write(layout.FINISHED)
        self._ending.forget()
        self._stack_dump.forget()
        self.writer.detach()

    def abandon(self) -> None:
        """In a forked child: it is not the rank. Its parent's record stays as it is."""
        self._ending.forget()
        self._stack_dump.forget()
        self.timeline.stop()
        self.writer.detach()

    def _phase_index(self, name: str) -> int:
        """The index of a phase, one of the record's own or the user's; OTHER once there are too many."""
        name = str(name)
        names = [*layout.PHASES, *self._phases]
        if name in names:
            return names.index(name)
        if len(names) == layout.MAX_PHASES:
            if not self._phases_are_full:
                logger.warning("rankscope: no place for phase %r: %d are in use", name, layout.MAX_PHASES)
            self._phases_are_full = True
            return layout.OTHER
        self._phases.append(name)
        self._refresh()
        return len(names)

    def _enter_phase(self, name: str) -> Phases | None:
        index = self._phase_index(name)
        return self.timeline.checkpoints.begin() if index == layout.CHECKPOINT else self.timeline.enter(index)

    def _leave_phase(self, name: str, opened: Phases | None, succeeded: bool) -> None:
        if opened is None:
            return
        if str(name) == layout.PHASES[layout.CHECKPOINT]:
            self.timeline.checkpoints.end(opened, 0.0 if succeeded else None)
        else:
            self.timeline.leave(opened)

    def _explicit_step(self, samples: float | None, tokens: float | None) -> None:
        timeline = self.timeline
        if timeline.steps.marker != SCRIPT and not timeline.steps.take_over(SCRIPT):
            return  # the backward pass before it was this step
        if samples is not None:
            timeline.steps.fetched_samples = float(samples)
        if tokens is not None:
            timeline.steps.fetched_tokens = float(tokens)
        timeline.step()

    def _watch_iterator(self, iterator: Iterator[Any]) -> Iterator[Any]:
        from rankscope.probes import data_wait

        return data_wait.timed(self.timeline, self._timed, iterator)

    def _on_event(self, phase: int) -> None:
        """Publish at the first event that tells that this process trains."""
        if not (identity.is_distributed() or self._trains_alone(phase)) or _is_loader_worker():
            return
        self.timeline.on_event = None
        for name, probe in probes.late_probes().items():
            self._install(name, probe)
        self._info = identity.describe()
        try:
            self._publish()
        except OSError as error:
            named = "RANKSCOPE_RUN_DIR: " if os.environ.get("RANKSCOPE_RUN_DIR") else ""
            reason = replace_unprintable(str(error), ERROR_LIMIT)
            logger.warning("rankscope: no record of this rank, training goes on: %s%s", named, reason)
            return
        self._ending.watch_published()
        self._stack_dump.watch()
        self._refresh()
        self._announcer.begin()

    def _publish(self) -> None:
        directory = run_directory()
        with opened(directory) as descriptor:
            if (why := weakness(descriptor)) and self._info["local_rank"] == "0":  # once a node is enough
                logger.warning(
                    "rankscope: the run directory %s %s", replace_unprintable(str(directory), ERROR_LIMIT), why
                )
            remove_old_records(directory, descriptor, self._info)
        self.writer.publish(directory, identity.file_name(self._info), self._full_info())

    def _trains_alone(self, phase: int) -> bool:
        """Whether this is training without a process group; under torchrun, where one may still come, after a while."""
        expects_group = int(number("WORLD_SIZE", default="1")) > 1
        return phase in TRAINING_EVENTS and not (expects_group and self.timeline.steps.count < STEPS_WITHOUT_GROUP)

    def _refresh(self) -> None:
        if self._info:
            self.writer.write_info(self._full_info())

    def _full_info(self) -> dict[str, Any]:
        return {
            **self._info,
            "phases": self._phases,
            "groups": self.timeline.groups.names,
            "probes_disabled": self._disabled,
            "stacks": self._stack_dump.info,
            "settings": self._settings.known,
        }

    def _on_probe_failure(self, probe: str) -> None:
        self._disabled.append(probe)
        self.timeline.unwind()
        self._refresh()


_attachment: Attachment | None = None


def instrument() -> None:
    """Watch the training in this process. Twice is once. Never raises: without torch it warns and does nothing."""
    global _attachment
    if _attachment is not None:
        return
    if sys.platform != "linux":
        logger.warning("rankscope: only Linux is supported; this process is not watched")
        return
    try:
        attachment = Attachment()
        attachment.install()
    except Exception as error:
        if guard.reraise:
            raise
        logger.warning("rankscope: this process is not watched: %s", error)
        return
    _attachment = attachment
    forks.watch(_after_fork)


def uninstrument() -> None:
    """Undo `instrument()` exactly."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is not None:
        attachment.remove()


def _take_back(undo: Undo) -> None:
    """One that fails keeps none of the others from being taken back, nor the host from going on."""
    try:
        undo()
    except Exception as error:
        if guard.reraise:
            raise
        logger.warning("rankscope: a patch could not be taken back: %s", error, exc_info=error)


def current() -> Attachment | None:
    """What `instrument()` attached, if it did."""
    return _attachment


def _after_fork() -> None:
    """A child of a rank is a loader worker or a helper, not the rank. A child of a process that has not trained
    may be one (ranks that are started by fork): its probes stay, and it begins a record of its own.
    """
    global _attachment
    if _attachment is None:
        return
    if _attachment.timeline.on_event is None:
        _attachment.abandon()
        _attachment = None
        return
    # The probes hold the timeline: it begins again and stays the same object.
    _attachment.timeline.restart()


def _is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
