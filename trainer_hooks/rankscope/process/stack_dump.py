"""Python stacks of all threads for `rankscope stacks`: faulthandler writes them when it gets a signal.

faulthandler's handler runs in C, so it works in a process that is stuck in a call. It writes to an anonymous file in
memory, which the process's user can open below /proc, and which ends with the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from rankscope.process.ending import has_foreign_handler
from rankscope.record.own_descriptor import OwnDescriptor

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 10  # macOS has none, but imports this module
MEMORY_FILE = "rankscope-stacks"


class StackDump:
    """Answers one signal; `forget` is the exact inverse of `watch`."""

    def __init__(self) -> None:
        self._descriptor: OwnDescriptor | None = None

    @property
    def info(self) -> dict[str, int]:
        """The signal to send and the descriptor of the answer; empty while the signal is not handled."""
        return {"signal": SIGNAL, "descriptor": self._descriptor.number} if self._descriptor else {}

    def watch(self) -> None:
        """Handle the signal from now on, unless the job already does."""
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL or has_foreign_handler(SIGNAL):
            return
        with contextlib.suppress(OSError):  # no memory: no stacks
            self._open()

    def _open(self) -> None:
        self._descriptor = OwnDescriptor(os.memfd_create(MEMORY_FILE))
        faulthandler.register(SIGNAL, file=self._descriptor.number, all_threads=True, chain=False)

    def renew(self) -> bool:
        """Open a new file if the job has closed the descriptor. Return whether it had."""
        if self._descriptor is None or self._descriptor.is_ours:
            return False
        try:
            self._open()
        except OSError:
            self.forget()
        return True

    def forget(self) -> None:
        """Stop handling the signal, and close the file."""
        if self._descriptor is None:
            return
        # Keep a handler that was set since: unregister would restore the one before ours.
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            faulthandler.unregister(SIGNAL)
        self._descriptor.close()
        self._descriptor = None
