"""`instrument()` and its exact inverse: they install and remove the probes and all other patches."""

from __future__ import annotations

import atexit
import sys
from types import ModuleType
from typing import Any

from rankscope import guard, probes
from rankscope.announcements import Announcer, figures, own_snapshot
from rankscope.closing_figures import ClosingFigures
from rankscope.exhaustion import Exhaustion
from rankscope.guard import Guard, logger
from rankscope.logged_values import LoggedValues
from rankscope.patch import Undo
from rankscope.process import descriptors, forks, identity
from rankscope.process.ending import Ending
from rankscope.process.stack_dump import StackDump
from rankscope.publication import UPDATE_EVENTS, Publication
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.script import Script
from rankscope.settings import Settings
from rankscope.timeline.timeline import Timeline
from rankscope.trackers import Trackers


class Attachment:
    """Everything that Rankscope adds to this process: one timeline, one record, the probes."""

    def __init__(self) -> None:
        self.writer = RankWriter()
        self.timeline = Timeline(self.writer)
        self._disabled: list[str] = []
        self._guards: list[Guard] = []
        self._undo: list[Undo] = []
        self._stack_dump = StackDump()
        self.publication = Publication(self.writer, self._details)
        self._has_late_probes = False
        self._announcer = Announcer(self.timeline, self.publication.info)
        announcements, trackers, logged = map(self._guard, ("announcements", "trackers", "logged_values"))
        self._closing = ClosingFigures(trackers, self._figures)
        self._trackers = Trackers(trackers, self.publication.refresh, self._closing.watch)
        self._end_announcer = announcements(self._announcer.end)
        exhaustion = Exhaustion(self.timeline)
        self._ending = Ending(self.writer, self._on_end, self._guard("exhaustion")(exhaustion.note))
        self._logged = LoggedValues(self.timeline, logged)
        self._polls = (announcements(self._announcer.poll), trackers(self._trackers.poll), logged(self._logged.poll))
        self._settings = Settings(self.timeline, self.publication.refresh)
        self.script = script = Script(self.timeline, self._guard, self.publication.refresh, exhaustion.note_left)
        # For api.py, which saves a lookup.
        self.enter_phase, self.leave_phase = script.enter_phase, script.leave_phase
        self.step, self.timed, self.log = script.step, script.timed, self._logged.note

    def install(self) -> None:
        """Install every probe. One that fails is off; the others work."""
        from rankscope.probes.compiler import skip_package, uncompiled  # imports torch, as the probes do

        atexit.register(self._pass_through)  # first, so that it runs last
        record = self._guard("record")
        self._find_training = uncompiled(record(self._on_event))
        self._find_rank = uncompiled(record(self._on_event_in_new_group))
        self.timeline.on_event = self._find_training
        self.timeline.groups.on_new = uncompiled(self.publication.refresh)
        self.timeline.groups.on_default = self._on_default_group
        for name, probe in probes.all_probes().items():
            self._install(name, probe)
        skip_package()
        keep_descriptors = self._guard("descriptors")(self._keep_descriptors)
        self.timeline.steps.polls += (
            self._guard("settings")(self._settings.poll),
            *self._polls,
            self._guard("ending")(self._ending.poll),
            # A removed record first: its lost descriptor cannot be opened again.
            self._guard("record")(self._keep_record),
            keep_descriptors,
        )
        self._undo += (self._trackers.remove, self._logged.remove, descriptors.watch(keep_descriptors))
        self._ending.watch()

    def _install(self, name: str, probe: ModuleType) -> None:
        probe_guard = self._guard(name)
        try:
            self._undo.extend(probe.install(self.timeline, probe_guard))
        except BaseException as error:
            probe_guard.disable(error)

    def _guard(self, name: str) -> Guard:
        self._guards.append(Guard(name, self._on_probe_failure, self.timeline.unwind))
        return self._guards[-1]

    def _pass_through(self) -> None:
        """Let every patched function only call its original from now on, because the interpreter ends.

        It clears modules next, and objects that still live then call patched functions in their `__del__`, such as a
        loader with persistent workers.
        """
        for one in self._guards:
            one.disabled = True
        self._ending.pass_through()

    def _keep_descriptors(self) -> None:
        """Reopen descriptors that the job has closed along with its own: the record's and the stack dump's."""
        if self.writer.renew():
            self._ending.renew()
        if self._stack_dump.renew():
            self.publication.refresh()

    def _keep_record(self) -> None:
        """Publish the record again if its file was removed (logind removes a user's files in /dev/shm at logout)."""
        if self.writer.is_removed:
            self.publication.publish_again()
            self._ending.renew()

    def remove(self) -> None:
        """Restore every patched object, end the record as finished and stop counting."""
        atexit.unregister(self._pass_through)
        self.timeline.stop()
        for undo in reversed(self._undo):
            _restore(undo)
        self._undo.clear()
        self._ending.write(layout.FINISHED)
        self._ending.forget()
        self._closing.forget()
        self._stack_dump.forget()
        self.writer.detach()

    def note_fork(self, is_forking: bool) -> None:
        """Note SIGTERM in any thread while this process forks."""
        self._ending.note_in_any_thread(is_forking)

    def begin_as_child(self) -> None:
        """Start over in a forked child, which may become a rank of its own. Its parent's record stays as it is."""
        self.publication.restart()
        identity.mark_group_as_inherited()
        self._restart()

    def _restart(self) -> None:
        """Start an empty record at the next event that shows that this process trains.

        The timeline stays the same object, because the probes hold it.
        """
        self._ending.forget()
        self._stack_dump.forget()
        self.writer.detach()
        self.timeline.restart()
        self._settings.restart()
        self._trackers.restart()
        self._logged.restart()
        self._closing.forget()
        self.timeline.on_event = self._find_training
        self._ending.watch()

    def _on_default_group(self, exists: bool) -> None:
        """Find out at the next events whether the process still trains, and whether as another rank."""
        if not self.publication.has_identity:
            return
        if exists:
            self._ending.resume_group()
        else:
            self._ending.leave_group()
        self.timeline.on_event = self._find_rank

    def _on_event_in_new_group(self, event: int) -> None:
        is_distributed = identity.is_distributed()
        if not (is_distributed or event in UPDATE_EVENTS):
            return  # a rank may evaluate after it has left its group
        self.timeline.on_event = None
        self._ending.resume_group()
        if not is_distributed:
            return
        if self.publication.is_same_rank():
            self.publication.refresh()
            return
        self._ending.write(layout.FINISHED)
        self.publication.leave_rank()
        self._restart()
        self._on_event(event)

    def _on_event(self, event: int) -> None:
        """Publish the record at the first event that shows that this process trains."""
        if not self.publication.is_training(self.timeline, event):
            return
        self.timeline.on_event = None
        if not self._has_late_probes:
            self._has_late_probes = True
            for name, probe in probes.late_probes().items():
                self._install(name, probe)
        if self.publication.publish():
            self._ending.watch_published()
            self._stack_dump.watch()
            self.publication.refresh()
            self._announcer.begin()

    def _details(self) -> dict[str, Any]:
        return {
            "uuid": identity.gpu_uuid(self.timeline.job.device),
            "phases": self.script.phases,
            "groups": self.timeline.groups.names,
            "group_descriptions": self.timeline.groups.descriptions,
            "pairwise": self.timeline.groups.pairwise,
            "probes_disabled": self._disabled,
            "stacks": self._stack_dump.info,
            "settings": self._settings.known,
            "tracker_ids": self._trackers.ids,
            "tracker_urls": self._trackers.urls,
        }

    def _figures(self) -> dict[str, str | float]:
        return figures(own_snapshot(self.timeline, self.publication.info()), self.timeline.steps.marker)

    def _on_end(self) -> None:
        self._end_announcer()
        self._closing.write()

    def _on_probe_failure(self, probe: str) -> None:
        self._disabled.append(probe)
        self.timeline.unwind()
        self.publication.refresh()


_attachment: Attachment | None = None


def instrument() -> None:
    """Watch the training in this process. Idempotent. Never raises: without torch it warns and does nothing."""
    global _attachment
    if _attachment is not None:
        return
    if sys.platform != "linux":
        logger.warning("rankscope: only Linux is supported; not watching this process")
        return
    try:
        attachment = Attachment()
        attachment.install()
    except Exception as error:
        if guard.reraise:
            raise
        logger.warning("rankscope: not watching this process: %s", error)
        return
    _attachment = attachment
    forks.watch(_on_fork, _after_fork)


def uninstrument() -> None:
    """Undo `instrument()` exactly."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is not None:
        attachment.remove()


def _restore(undo: Undo) -> None:
    """Undo one patch. If that fails, the others are still undone and the job goes on."""
    try:
        undo()
    except Exception as error:
        if guard.reraise:
            raise
        logger.warning("rankscope: cannot undo a patch: %s", error, exc_info=error)


def current() -> Attachment | None:
    """Return what `instrument()` attached, or None."""
    return _attachment


def _on_fork(is_forking: bool) -> None:
    if _attachment is not None:
        _attachment.note_fork(is_forking)


def _after_fork() -> None:
    """Keep the probes in a forked child, which may be a loader worker or a rank. If it trains it gets a record."""
    if _attachment is not None:
        _attachment.begin_as_child()
