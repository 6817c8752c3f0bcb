"""How the process ended, written into its record while it still can speak.

A clean exit and an uncaught exception say so themselves. SIGTERM (a planned stop) is noted by faulthandler,
which runs even while the process is blocked in a C call, and then hands on to whatever handled SIGTERM before.
What ends without any of these was killed; the reader concludes that from the freed lock.
"""

from __future__ import annotations

import atexit
import faulthandler
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.record import PLACES


class Ending:
    """Watches for the end of this process on behalf of one writer; `forget` is the exact inverse of `watch`."""

    def __init__(self, writer: RankWriter) -> None:
        self._writer = writer
        self._excepthook: Callable[..., object] = sys.excepthook
        self._watches_sigterm = False

    def watch(self) -> None:
        """Notice a clean exit and an uncaught exception from now on."""
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def watch_sigterm(self) -> None:
        """Notice SIGTERM too; possible once the record is a file."""
        descriptor = self._writer.fileno()
        if descriptor < 0 or not hasattr(faulthandler, "register"):
            return
        faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=False, chain=True)
        self._watches_sigterm = True

    def forget(self) -> None:
        """Take every watch back."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._on_exit)
        if self._watches_sigterm:
            faulthandler.unregister(signal.SIGTERM)
            self._watches_sigterm = False

    def write(self, how: float) -> None:
        """Record how it ended, unless that is already known."""
        slots = self._writer.slots
        if slots[PLACES["ended"]] == record.RUNNING:
            slots[PLACES["ended_unix"]] = time.time()
            slots[PLACES["ended"]] = how

    def _on_exit(self) -> None:
        self.write(record.FINISHED)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.write(record.EXCEPTION)
        self._excepthook(kind, error, trace)
