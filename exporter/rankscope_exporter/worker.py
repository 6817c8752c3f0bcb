"""A thread that calls a function periodically until it is stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """Calls `task` every `interval` seconds on a thread; a call that takes longer is followed by the next at once.

    If `task` returns a number, the next call starts after that many seconds. An exception is logged with the message
    `failure` (once as long as it is the same), and the calls continue: nothing would restart the thread. `at_end` runs
    on the thread after the last call and closes what the thread has opened. In a `with` statement, the thread runs as
    long as the block.
    """

    def __init__(
        self,
        name: str,
        interval: float,
        task: Callable[[], float | None],
        failure: str,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval = interval
        self._task = task
        self._failure = failure
        self._at_end = at_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """Name of the thread, as `ps -T` and py-spy show it."""
        return self._thread.name

    @property
    def is_running(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, which calls `task` at once."""
        self._thread.start()

    def request_stop(self) -> None:
        """Let the current call be the last; `join` waits for the thread's end."""
        self._stop.set()

    def join(self, within: float) -> bool:
        """Wait up to `within` seconds; return whether the thread has ended. If it hangs, it ends with the process."""
        self._thread.join(max(0.0, within))
        return not self._thread.is_alive()

    def stop(self, within: float = 1.0) -> bool:
        """Stop the thread and wait for its end."""
        self.request_stop()
        return self.join(within)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        last_error = ""
        while not self._stop.is_set():
            began, pause, new_error = time.monotonic(), None, ""
            try:
                pause = self._task()
            except Exception as error:
                new_error = repr(error)
                if new_error != last_error:
                    logger.exception(self._failure)
            last_error = new_error
            self._stop.wait(began + self._interval - time.monotonic() if pause is None else pause)
        self._at_end()
