"""The Python stacks of every thread, written by faulthandler when its signal comes: `rankscope stacks` asks for them.

faulthandler's handler runs in C: it answers from a process that is stuck in a call, too. It writes into a nameless file
in memory, which the process's own user can open below /proc and which goes when the process goes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from rankscope.process.ending import has_foreign_handler

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 10  # a Mac has none; nothing is watched there, but this is imported
MEMORY_FILE = "rankscope-stacks"


class StackDump:
    """Answers one signal; `forget` is the exact inverse of `watch`."""

    def __init__(self) -> None:
        self._descriptor = -1

    @property
    def info(self) -> dict[str, int]:
        """What who asks has to know: the signal, and which descriptor the answer is in. Empty while nobody answers."""
        return {"signal": SIGNAL, "descriptor": self._descriptor} if self._descriptor >= 0 else {}

    def watch(self) -> None:
        """Answer from now on, unless the signal is somebody's already."""
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL or has_foreign_handler(SIGNAL):
            return
        with contextlib.suppress(OSError):  # no memory for it: then there are no stacks
            self._descriptor = os.memfd_create(MEMORY_FILE)
            faulthandler.register(SIGNAL, file=self._descriptor, all_threads=True, chain=False)

    def forget(self) -> None:
        """Answer the signal no more, and close the file."""
        if self._descriptor < 0:
            return
        # Whoever has taken the signal since keeps it: unregister would put back what we found.
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            faulthandler.unregister(SIGNAL)
        os.close(self._descriptor)
        self._descriptor = -1
