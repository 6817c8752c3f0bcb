"""A thread that takes one turn after another, until it is told to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """Calls `turn` every `interval` seconds, or as soon as the last call has ended where that took longer.

    Where `turn` returns a number, that is the seconds until the next. What it raises is logged after the words of
    `complaint`, once for as long as it is the same, and the next call is made all the same: a mistake of ours in one of
    them shall neither end what nobody would start again nor fill the log. `at_end` is called in the thread, too: what
    is open there may have to be closed there. In a `with` statement it runs for as long as the block.
    """

    def __init__(
        self,
        name: str,
        interval: float,
        turn: Callable[[], float | None],
        complaint: str,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval = interval
        self._turn = turn
        self._complaint = complaint
        self._at_end = at_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """The thread's, as `ps -T` and py-spy show it."""
        return self._thread.name

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Take the first turn, and go on."""
        self._thread.start()

    def request_stop(self) -> None:
        """Take no more turns; `join` waits for the end."""
        self._stop.set()

    def join(self, within: float) -> bool:
        """Whether the thread has ended within so many seconds. One that hangs in a call ends with the process."""
        self._thread.join(max(0.0, within))
        return not self._thread.is_alive()

    def stop(self, within: float = 1.0) -> bool:
        """Have it end, and wait for that."""
        self.request_stop()
        return self.join(within)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        said = ""
        while not self._stop.is_set():
            began, pause, mistake = time.monotonic(), None, ""
            try:
                pause = self._turn()
            except Exception as error:
                mistake = repr(error)
                if mistake != said:
                    logger.exception(self._complaint)
            said = mistake
            self._stop.wait(began + self._interval - time.monotonic() if pause is None else pause)
        self._at_end()
