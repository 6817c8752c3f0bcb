"""Writes a rank's own time by phase to the tracker's run at its end, if RANKSCOPE_TRACKER_SUMMARY=1.

A tracker may wait minutes for its server. So a thread writes, and the job continues after at most two seconds. The
thread starts when the run is found, because Python 3.12 starts none during the interpreter's shutdown.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

from rankscope.guard import Guard, logger
from rankscope.patch import Patches
from rankscope.process.switches import is_on
from rankscope.trackers import Figures, TrackerRun

LONGEST_WAIT = 2.0  # seconds that the job waits at its end, for all trackers together

Write = Callable[[Figures], object]
Task = tuple[list[Write], Figures, threading.Event]


class ClosingFigures:
    """Writes `figures()` once to each watched run: before a W&B run finishes, else at the job's end."""

    def __init__(self, guard: Guard, figures: Callable[[], Figures]) -> None:
        self._figures = figures
        self._watch, self.write = guard(self._watch_run), guard(self._write)
        self._patches = Patches()
        self._runs: dict[str, TrackerRun] = {}
        self._queue: queue.SimpleQueue[Task | None] | None = None

    def forget(self) -> None:
        """Stop watching and restore what was patched. The thread ends when it has written."""
        self._runs.clear()
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        atexit.unregister(self.write)
        self._patches.undo()

    def watch(self, tracker: str, run: TrackerRun) -> None:
        """Write to this run at its end, if RANKSCOPE_TRACKER_SUMMARY is set and the tracker has a summary."""
        if run.write is not None and is_on("RANKSCOPE_TRACKER_SUMMARY"):
            self._watch(tracker, run)

    def _watch_run(self, tracker: str, run: TrackerRun) -> None:
        self._runs[tracker] = run
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._queue,), name="rankscope-trackers", daemon=True).start()
        # Exit functions run in reverse order: this one runs before the tracker's, which ends the run.
        atexit.unregister(self.write)
        atexit.register(self.write)
        owner = type(run.source)
        if hasattr(owner, "_finish"):
            # Both `finish()` and `__exit__` call it. A running `with` block has looked up its `__exit__` already.
            self._patches.add(owner, "_finish", self._wrap_finish)

    def _wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(source: Any, *args: Any, **kwargs: Any) -> Any:
            self.write(source)
            return original(source, *args, **kwargs)

        return watched

    def _write(self, source: Any = None) -> None:
        """Write to the runs of W&B's object `source`; by default to all."""
        runs = {tracker: run for tracker, run in self._runs.items() if source is None or run.source is source}
        figures = self._figures() if runs else {}
        for tracker in runs:
            del self._runs[tracker]
        if figures and self._queue is not None:
            is_done = threading.Event()
            self._queue.put(([run.write for run in runs.values() if run.write], figures, is_done))
            if not is_done.wait(LONGEST_WAIT):
                logger.warning("rankscope: trackers took more than %g s; their summary may be missing", LONGEST_WAIT)


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while task := tasks.get():
        writes, figures, is_done = task
        for write in writes:
            _try(write, figures)
        is_done.set()


def _try(write: Write, figures: Figures) -> None:
    try:
        write(figures)
    except Exception:  # a tracker may raise anything
        logger.debug("rankscope: cannot write the summary to a tracker", exc_info=True)
