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
from rankscope.record.own_descriptor import OwnDescriptor

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 10  # a Mac has none; nothing is watched there, but this is imported
MEMORY_FILE = "rankscope-stacks"


class StackDump:
    """Answers one signal; `forget` is the exact inverse of `watch`."""

    def __init__(self) -> None:
        self._descriptor: OwnDescriptor | None = None

    @property
    def info(self) -> dict[str, int]:
        """What who asks has to know: the signal, and which descriptor the answer is in. Empty while nobody answers."""
        return {"signal": SIGNAL, "descriptor": self._descriptor.number} if self._descriptor else {}

    def watch(self) -> None:
        """Answer from now on, unless the signal is somebody's already."""
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL or has_foreign_handler(SIGNAL):
            return
        with contextlib.suppress(OSError):  # no memory for it: then there are no stacks
            self._open()

    def _open(self) -> None:
        self._descriptor = OwnDescriptor(os.memfd_create(MEMORY_FILE))
        faulthandler.register(SIGNAL, file=self._descriptor.number, all_threads=True, chain=False)

    def renew(self) -> bool:
        """Answer in a new file if the job has closed the descriptor. Return whether that was so."""
        if self._descriptor is None or self._descriptor.is_ours:
            return False
        try:
            self._open()
        except OSError:
            self.forget()
        return True

    def forget(self) -> None:
        """Answer the signal no more, and close the file."""
        if self._descriptor is None:
            return
        # Whoever has taken the signal since keeps it: unregister would put back what we found.
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            faulthandler.unregister(SIGNAL)
        self._descriptor.close()
        self._descriptor = None
