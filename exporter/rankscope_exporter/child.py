"""Child processes that print lines of JSON, and that are never waited for.

One that waits for a broken driver or for a dead network file system cannot be killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LINES_LIMIT = 100_000
END_WITHIN = 0.2  # seconds for the end after SIGKILL; eight GPUs may all be stuck
ERROR_LIMIT = 2**18  # bytes of the standard error; what follows cannot be written
NO_VARIABLES: Mapping[str, str] = {}
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


class Child:
    """A process with a thread that collects its lines. It is killed at the end of a `with` statement."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES, unset: Sequence[str] = ()
    ) -> None:
        """Start the process. Raises OSError."""
        self.lines: list[dict[str, Any]] = []
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        with contextlib.ExitStack() as stack:
            # In memory: a disk may be full, or not answer. It cannot grow.
            errors = os.memfd_create("errors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._errors = stack.enter_context(open(errors, "w+b"))  # noqa: PTH123 - a descriptor
            self._errors.truncate(ERROR_LIMIT)
            fcntl.fcntl(errors, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
            self._process = subprocess.Popen(  # noqa: S603 - this package's own program
                command,
                # With `-m`, Python imports from the current directory first, which may belong to another user.
                cwd="/",
                env={**environment, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            stack.pop_all()  # open as long as the process
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def send(self, value: object) -> None:
        """Write a line of JSON to the process, if it is still there."""
        stdin = self._process.stdin
        assert stdin
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(value) + "\n")
            stdin.flush()

    def wait(self, until: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the condition holds or the output ends; False if neither did before this monotonic time."""
        while time.monotonic() < until:
            if condition() or not self._thread.is_alive():
                return True
            self._thread.join(0.05)
        return False

    @property
    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0 if not self._thread.is_alive() else 0.0)
        return None

    @property
    def error(self) -> str:
        """Return the last line of its standard error that names an error, or the last line."""
        written = os.pread(self._errors.fileno(), ERROR_LIMIT, 0).rstrip(b"\0")  # the process may write on
        lines = written.decode(errors="replace").strip().splitlines()
        named = [line for line in lines if ERROR.match(line)]  # torch adds lines of advice to an error of CUDA
        return (named or lines or [""])[-1].strip()

    def kill(self) -> None:
        """Kill the process and its session, without waiting for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WITHIN)
        self._thread.join(END_WITHIN)
        if not self._thread.is_alive():  # otherwise the process is still there, in the driver
            for stream in (self._process.stdin, self._process.stdout, self._errors):
                with contextlib.suppress(OSError):  # the pipe's reader has ended
                    stream.close()  # type: ignore[union-attr]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _collect(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a library may print something else
                value = json.loads(line)
                if isinstance(value, dict) and len(self.lines) < LINES_LIMIT:
                    self.lines.append(value)
