"""Writing into the record how the process ended.

The process itself notes a clean exit, an uncaught exception, Ctrl-C, and the status of `os._exit` and `sys.exit`.
faulthandler notes SIGTERM (a planned stop), even while the process is blocked in a C call, and then calls the previous
handler. A rank that still trains long after that was not stopped, so the note is erased. A process that ends without
any of these was killed; the reader concludes that from the released lock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from _sitebuiltins import Quitter  # of `exit` and `quit`
from collections.abc import Callable
from dis import opmap
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from rankscope.patch import Patches
from rankscope.record import layout
from rankscope.record.clock import renew_unix_times
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter

FILE_CLOCK_LAG = 0.1  # seconds; a file's time is that of the kernel's last tick
SIGTERM_GRACE = 35.0  # seconds; Slurm, Kubernetes and torchrun kill 30 s after SIGTERM, and take a moment for it
SIGNALS = 128  # a shell's exit status above this names the signal that ended a program


class Ending:
    """Watches for the end of this process, for one writer. `forget` is the exact inverse of the watches."""

    def __init__(
        self,
        writer: RankWriter,
        on_end: Callable[[], object] = lambda: None,
        on_error: Callable[[BaseException | None], object] = lambda _error: None,
    ) -> None:
        """`on_error` is called with the exception before the end is in the record, and `on_end` once, after that."""
        self._writer = writer
        self._on_end, self._on_error = on_end, on_error
        self._excepthook: Callable[..., object] = sys.excepthook
        self._error_before: BaseException | None = None
        self._failure: SystemExit | None = None  # the script's request to exit, as long as it may not be caught
        self._patches = Patches()
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._sigterm_before: object = None
        self._watches_sigterm = False
        self._noted_sigterm = (0, 0.0)  # the end of the last words, and when a step first ended with them
        self._is_over = False

    def watch(self) -> None:
        """Start to watch for a clean exit and an uncaught exception."""
        self._excepthook = sys.excepthook
        self._error_before = getattr(sys, "last_value", None)
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        for name, watch in (("_exit", self._watch_os_exit), ("execv", self._watch_exec), ("execve", self._watch_exec)):
            self._patches.add_in_os(name, watch)
        self._patches.add(sys, "exit", self._watch_sys_exit)
        self._patches.add(Quitter, "__call__", self._watch_sys_exit)
        self._patches.add(signal, "signal", self._watch_handlers)

    def watch_published(self) -> None:
        """Start the watches that need a record, or that are needed only once there is one."""
        # A multiprocessing child ends by os._exit, without atexit, but runs its finalizers. They are cleared before its
        # target runs, so this is not in `watch`.
        self._finalizer = multiprocessing.util.Finalize(None, self._on_exit, exitpriority=0)
        if not has_foreign_handler(signal.SIGTERM):
            self._sigterm_before = signal.getsignal(signal.SIGTERM)
            faulthandler.register(signal.SIGTERM, file=self._writer.fileno(), all_threads=False, chain=True)
            self._watches_sigterm = True

    def renew(self) -> None:
        """Register SIGTERM with the record's current descriptor; unregister it if the record has none."""
        if self._watches_sigterm and self._writer.fileno() >= 0:
            # If it is still registered, this changes only the number, not the handler.
            faulthandler.register(signal.SIGTERM, file=self._writer.fileno(), all_threads=False, chain=True)
        elif self._watches_sigterm:
            self._forget_sigterm()

    def note_in_any_thread(self, is_forking: bool) -> None:
        """Note SIGTERM also in a thread without Python code while the process forks, and then no longer.

        Such a thread (NCCL, OpenMP) receives it while the forking thread blocks it. faulthandler then reads the stacks
        of the Python threads, which could crash a process that handles the signal: not if it survives.
        """
        if self._watches_sigterm and (not is_forking or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
            descriptor = self._writer.fileno()
            if descriptor >= 0:
                faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=is_forking, chain=True)

    def poll(self) -> None:
        """Forget, at the end of a step, what the process has survived by training on: a caught exit, a SIGTERM."""
        self.forget_failure()
        end, (noted_end, since), now = self._writer.last_words_end(), self._noted_sigterm, time.monotonic()
        if end != noted_end:
            self._noted_sigterm = (end, now)
        elif end and now - since > SIGTERM_GRACE:
            self._noted_sigterm = (0, 0.0)
            self._writer.forget_last_words()

    def pass_through(self) -> None:
        """Let the patched functions only call their originals from now on. The interpreter clears modules next."""
        self._is_over = True

    def _watch_handlers(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap `signal.signal`: a job that restores the default handler of SIGTERM also removes the hook's."""

        def watched(*args: object, **kwargs: object) -> object:
            before = original(*args, **kwargs)
            if not self._is_over and args == (signal.SIGTERM, signal.SIG_DFL) and self._watches_sigterm:
                with contextlib.suppress(Exception):
                    faulthandler.unregister(signal.SIGTERM)
                    self.renew()
            return before

        return watched

    def forget(self) -> None:
        """Undo every watch."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._on_exit)
        self._patches.undo()
        self.forget_failure()
        if self._finalizer is not None:
            self._finalizer.cancel()
        if self._watches_sigterm:
            self._forget_sigterm()

    def _forget_sigterm(self) -> None:
        """Unregister faulthandler, which restores the handler that it found, but keep one that the job has set since.

        One that the job has registered with faulthandler itself is lost: faulthandler has only one per signal.
        """
        now = signal.getsignal(signal.SIGTERM)
        is_ours = now is self._sigterm_before or now is None
        # Only the main thread may set a handler. On another thread, ours stays registered behind the job's.
        if is_ours or threading.current_thread() is threading.main_thread():
            faulthandler.unregister(signal.SIGTERM)
            if not is_ours:
                signal.signal(signal.SIGTERM, now)
        self._watches_sigterm = False

    def write(self, how: float, error: BaseException | None = None) -> None:
        """Record how the process ended, and by which exception, unless that is already recorded."""
        slots = self._writer.slots
        if slots[INDEX["ended"]] in layout.NOT_ENDED:
            if how == layout.EXCEPTION:
                self._on_error(error)
            now = time.time()
            renew_unix_times(slots, now, time.monotonic())
            slots[INDEX["ended_unix"]] = now
            slots[INDEX["ended"]] = how
            self._on_end()

    def leave_group(self) -> None:
        """Record that the process has left its group: its work is finished. Does nothing while an error is handled."""
        if self._writer.slots[INDEX["ended"]] == layout.RUNNING and sys.exc_info()[1] is None:
            self._writer.slots[INDEX["ended"]] = layout.LEFT_GROUP

    def resume_group(self) -> None:
        """Record that the process still trains after it has left its group."""
        if self._writer.slots[INDEX["ended"]] == layout.LEFT_GROUP:
            self._writer.slots[INDEX["ended"]] = layout.RUNNING

    def forget_failure(self) -> None:
        """Forget the script's request to exit: it goes on, so it has caught it."""
        self._failure = None

    def _watch_os_exit(self, original: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        def watched(status: int) -> NoReturn:
            if isinstance(status, int) and not self._is_over:  # else it raises
                is_planned = is_success(status) or is_status_of_signal(status)
                self.write(layout.FINISHED if is_planned else layout.EXCEPTION, sys.exc_info()[1])
            original(status)

        return watched

    def _watch_exec(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that replaces the process, often by the same script: it does not run the exit functions."""

        def watched(*args: object, **kwargs: object) -> Any:
            # `os.execvp` tries each directory of the PATH.
            if self._is_over or not is_file(args[0] if args else kwargs.get("path")):
                return original(*args, **kwargs)
            before = self._writer.slots[INDEX["ended"]]
            self.write(layout.FINISHED)
            try:
                return original(*args, **kwargs)
            finally:
                self._writer.slots[INDEX["ended"]] = before  # it failed

        return watched

    def _watch_sys_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: object, **kwargs: object) -> Any:
            if self._is_over:
                return original(*args, **kwargs)
            error = error_of_exit(original, *args, **kwargs)
            is_main = threading.current_thread() is threading.main_thread() and not is_interactive()
            self._failure = error if is_main and is_failure(error) else None
            raise error.with_traceback(None)

        return watched

    def _on_exit(self) -> None:
        """Record a clean end, unless an exception is being raised or went through another excepthook."""
        failure = self._failure
        error = sys.exc_info()[1] or (failure if failure and is_uncaught(failure) else None)
        if isinstance(error, SystemExit):
            self.write(layout.FINISHED if is_success(error.code) else layout.EXCEPTION, error)
            return
        last = None if is_interactive() else getattr(sys, "last_value", None)
        self._write_error(error or (last if last is not self._error_before else None))

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (self._is_over or is_interactive()):
            self._write_error(error)
        self._excepthook(kind, error, trace)

    def _write_error(self, error: BaseException | None) -> None:
        if error is None:
            self.write(layout.EXCEPTION if self._has_reported_error() else layout.FINISHED)
        else:
            self.write(layout.INTERRUPTED if isinstance(error, KeyboardInterrupt) else layout.EXCEPTION, error)

    def _has_reported_error(self) -> bool:
        """Return whether torch has written an error for torchrun (`@record`) after this process stopped training."""
        slots = self._writer.slots
        progress = slots[INDEX["started_unix"]] + sum(self._writer.phase_seconds[: layout.MAX_PHASES])
        try:
            return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).stat().st_mtime > progress - FILE_CLOCK_LAG
        except (KeyError, OSError, ValueError):
            return False


def is_success(code: object) -> bool:
    """Return whether the exit code is status 0, of which the kernel keeps eight bits."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def is_failure(error: SystemExit) -> bool:
    """Return whether the script exits by this error because it failed, not because it was asked to stop.

    It may have been asked if it handles SIGTERM, catches Ctrl-C, or exits with a shell's status for a signal.
    """
    is_asked = callable(signal.getsignal(signal.SIGTERM)) or isinstance(error.__context__, KeyboardInterrupt)
    return not (is_success(error.code) or is_asked or is_status_of_signal(error.code))


def is_file(path: Any) -> bool:
    """Return whether this path or descriptor is that of a file."""
    try:
        return os.path.isfile(path)  # noqa: PTH113 - takes a descriptor, too
    except TypeError:
        return False


def is_status_of_signal(code: object) -> bool:
    """Return whether this is a shell's exit status for a program that a signal ended."""
    return isinstance(code, int) and code > SIGNALS


def error_of_exit(exit_function: Callable[..., NoReturn], *args: object, **kwargs: object) -> SystemExit:
    """Return the error that `sys.exit` or `exit` raises for these arguments."""
    try:
        exit_function(*args, **kwargs)
    except SystemExit as error:
        return error


def is_uncaught(error: BaseException) -> bool:
    """Return whether the error ended the main thread: no code caught it, or the last handler raised it again.

    Python drops that error before it calls the exit functions. Its traceback is as the last handler got it: a function
    that caught the error has gone on to another instruction, and a `finally` ends with one that raises again.
    """
    handled = error.__traceback__
    if handled is None:
        return True
    frame, code = handled.tb_frame, handled.tb_frame.f_code.co_code
    last = code[frame.f_lasti : frame.f_lasti + 2]  # the instruction and its argument: 0 for a `raise` without an error
    return (
        frame.f_lasti == handled.tb_lasti or last[0] == opmap["RERAISE"] or last == bytes((opmap["RAISE_VARARGS"], 0))
    )


def is_interactive() -> bool:
    """Return whether this process is or becomes a shell or notebook (`python -i`), which survives an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or bool(os.environ.get("PYTHONINSPECT"))


def has_foreign_handler(number: int) -> bool:
    """Return whether foreign C code handles the signal, such as the job's faulthandler, which would lose its file."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return signal.getsignal(number) is None
    with contextlib.suppress(OSError, ValueError):
        return catches("self", number)
    return True  # unknown: keep the job's handler


def catches(pid: int | str, number: int) -> bool:
    """Return whether the process handles the signal now, by /proc/PID/status. Raises OSError."""
    with Path(f"/proc/{pid}/status").open(errors="replace") as lines:  # a process's name may be any bytes
        caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
