"""A thread that does the same thing again and again, until it is told to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Periodic:
    """Calls `action` every `interval` seconds, or as soon as the last call has ended where that took longer.

    What it raises is logged after the words of `complaint`, and the next call is made all the same: a mistake of ours
    in one of them shall not end what nobody would start again.
    """

    def __init__(self, name: str, interval: float, action: Callable[[], object], complaint: str) -> None:
        self._interval = interval
        self._action = action
        self._complaint = complaint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Make the first call, and go on."""
        self._thread.start()

    def stop(self, within: float = 1.0) -> None:
        """End the thread. One that hangs in a call for more than so many seconds ends with the process."""
        self._stop.set()
        self._thread.join(within)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._action()
            except Exception:
                logger.exception(self._complaint)
            self._stop.wait(began + self._interval - time.monotonic())
