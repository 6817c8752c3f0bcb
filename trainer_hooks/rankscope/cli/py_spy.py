"""Asks py-spy for a process's stacks. The process may be hostile, so: so long, so many bytes, so much memory."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import subprocess
import time

WITHIN = 30.0  # seconds; it reads the symbols of every library first
ENDS_WITHIN = 5.0  # once it is killed; one that the kernel does not let go is left to it
MEMORY = 2 * 1024**3  # bytes; of a process with torch it takes 12 MiB


def stacks_by_py_spy(pid: int, limit: int) -> str:
    """At most `limit` bytes of what it says; empty where it is not installed or permitted, or comes to no end."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    deadline = time.monotonic() + WITHIN
    try:
        # A session of its own, so that what it started ends with it.
        process = subprocess.Popen(  # noqa: S603 - the user's own py-spy, with a number
            [command, "dump", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""
    try:
        with contextlib.suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        return _said(process, limit, deadline)
    except (TimeoutError, subprocess.TimeoutExpired):
        return ""
    finally:
        _end(process)


def _said(process: subprocess.Popen[bytes], limit: int, deadline: float) -> str:
    assert process.stdout is not None
    data = bytearray()
    while len(data) < limit:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), limit - len(data))
        if not piece:
            # Only what it calls complete: else the hook is asked, which does not need its permissions.
            return data.decode(errors="replace") if _ends_well(process, deadline) else ""
        data += piece
    return data.decode(errors="replace")


def _ends_well(process: subprocess.Popen[bytes], deadline: float) -> bool:
    return process.wait(max(0.0, deadline - time.monotonic())) == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN)
    if process.stdout is not None:
        process.stdout.close()
