"""The ranks of a capture: their records, and what their processes show, read once and in a bounded time.

A process is read only while it holds the lock of the rank's record, by the kernel, and belongs to the record's owner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rankscope.cli.living_ranks import RecordedRank
from rankscope.cli.lock_holder import NotTheRankError, process_of
from rankscope.cli.stack_text import Frame, read_threads
from rankscope.cli.stacks import NoStacksError, stacks
from rankscope.record.directory import open_directory, open_untrusted
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.stopped import is_stopped
from rankscope.record.text import NUMBER
from rankscope_exporter.capture.process_state import ProcessState, open_process, read_process
from rankscope_exporter.capture.request import Request, WantedRank
from rankscope_exporter.capture.settings import NONE, PY_SPY
from rankscope_exporter.capture.source import cut
from rankscope_exporter.capture.thread_waits import threads_for_gil

STACKS_LIMIT = 64 * 1024
"""The most bytes of a rank's stacks. A rank with 100 threads takes half of it."""
STACKS_WITHIN = 40.0
"""Seconds for the stacks of all ranks."""
OF_WORKERS = {"_get_data", "_try_get_data"}
"""Functions of torch's DataLoader that read what its workers send."""
GIL_SECONDS = 0.5
"""Seconds between two readings of the threads."""


@dataclass(frozen=True)
class CapturedRank:
    """One rank with a readable record."""

    wanted: WantedRank
    recorded: RecordedRank
    process: ProcessState | None = None
    """None if it has ended or is hidden; `hidden` has the reason."""
    hidden: str = ""
    is_stopped: bool = False
    gil_waiters: frozenset[int] = frozenset()
    """Its threads that wait for the interpreter's lock."""
    stacks: str = ""
    no_stacks: str = ""
    """The reason without stacks."""

    @property
    def number(self) -> int:
        """Return the rank's number."""
        return self.wanted.rank

    @cached_property
    def _frames(self) -> Sequence[Frame]:
        """The calls of the main thread, below those of a thread of C++ that works for it, such as autograd's.

        Without those of the hook, the innermost first.
        """
        threads = read_threads(self.stacks)
        of_main = [*(one for one in threads[1:] if not one.is_pythons), *threads[:1]]
        return [frame for one in of_main for frame in one.frames if not frame.is_own]

    @property
    def waits_for_workers(self) -> bool:
        """Return whether the main thread waits for a batch of another process, in torch's DataLoader."""
        return any(frame.name == "dataloader.py" and frame.function in OF_WORKERS for frame in self._frames)

    @property
    def frame(self) -> Frame | None:
        """Return the innermost call of the script, or else the innermost one of a library."""
        frames = self._frames
        users = next((frame for frame in frames if frame.is_users), None)
        return users or next((frame for frame in frames if not frame.is_standard), None)


def read_ranks(request: Request, stacks_by: str) -> Sequence[CapturedRank]:
    """Return the ranks whose records can still be read and belong to the run and its owner."""
    ranks = [one for wanted in request.ranks if (one := _recorded(request, wanted))]
    began = time.monotonic()
    first = [_with_process(one) for one in ranks]
    time.sleep(max(0.0, began + GIL_SECONDS - time.monotonic()))
    seconds = time.monotonic() - began
    second = [_compared(one, _with_process(one), seconds) for one in first]
    deadline = time.monotonic() + STACKS_WITHIN
    return [_with_stacks(one, stacks_by, deadline) for one in second]


def _recorded(request: Request, wanted: WantedRank) -> CapturedRank | None:
    """Return a rank from its record; None if that is gone, or is now another user's or another run's."""
    path = Path(wanted.record)
    try:
        with ExitStack() as opened:
            directory = open_directory(path.parent)
            opened.callback(os.close, directory)
            snapshot = read_rank(path, directory)
            descriptor = open_untrusted(path.name, directory)
            opened.callback(os.close, descriptor)
            owner = os.fstat(descriptor).st_uid
    except (OSError, UnreadableRecordError):
        return None
    info = snapshot.info
    is_the_rank = owner == request.owner and info.get("run") == request.run and NUMBER.fullmatch(str(info.get("rank")))
    return CapturedRank(wanted, RecordedRank(snapshot, owner)) if is_the_rank else None


def _with_process(one: CapturedRank) -> CapturedRank:
    snapshot, owner = one.recorded.snapshot, one.recorded.owner
    pid = snapshot.lock_pid
    if not snapshot.alive:
        return replace(one, hidden=f"it has ended ({snapshot.exit_reason})")
    if not pid:
        return replace(one, hidden="its process is in another container and not visible from here")
    try:
        with process_of(snapshot.path, pid, owner) as process:
            directory = open_process(pid)
            try:
                process.verify()  # so that the directory is this process's
                state = read_process(directory, pid, owner)
            finally:
                os.close(directory)
    except NotTheRankError as error:
        return replace(one, hidden=str(error))
    except OSError as error:
        return replace(one, hidden=error.strerror or str(error))
    return replace(one, process=state, is_stopped=is_stopped(pid))


def _compared(before: CapturedRank, after: CapturedRank, seconds: float) -> CapturedRank:
    if not (before.process and after.process):
        return after
    return replace(after, gil_waiters=threads_for_gil(before.process, after.process, seconds))


def _with_stacks(one: CapturedRank, stacks_by: str, deadline: float) -> CapturedRank:
    if stacks_by == NONE:
        return replace(one, no_stacks="not permitted (--capture.stacks=none)")
    if one.process is None:
        return replace(one, no_stacks=one.hidden)
    left = deadline - time.monotonic()
    if left <= 0.0:
        return replace(one, no_stacks=f"the other ranks took {STACKS_WITHIN:.0f} s")
    try:
        found = stacks(one.recorded, with_py_spy=stacks_by == PY_SPY, within=left)
    except NoStacksError as error:
        return replace(one, no_stacks=str(error))
    return replace(one, stacks=cut(found, STACKS_LIMIT))
