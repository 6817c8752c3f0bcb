"""Getting a process's stacks from py-spy. The process may be hostile, so time, output and memory are limited."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import subprocess
import time

WITHIN = 30.0  # seconds; py-spy reads the symbols of every library first
ENDS_WITHIN = 5.0  # seconds after SIGKILL; a process blocked in the kernel is left behind
MEMORY = 2 * 1024**3  # bytes; a process with torch takes 12 MiB


def stacks_by_py_spy(pid: int, limit: int, within: float = WITHIN, *, is_still: bool = False) -> str:
    """Return at most `limit` bytes of py-spy's output; empty if it is not installed, not permitted or too slow.

    A process that `is_still`, because it is stopped or waits in the kernel, is not paused: that would not end.
    """
    command = shutil.which("py-spy")
    if command is None:
        return ""
    deadline = time.monotonic() + within
    try:
        # In a new session, so that its child processes end with it.
        process = subprocess.Popen(  # noqa: S603 - the user's own py-spy, with a number
            [command, "dump", "--pid", str(pid), *["--nonblocking"] * is_still],
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
        return _read_output(process, limit, deadline)
    except (TimeoutError, subprocess.TimeoutExpired):
        return ""
    finally:
        _end(process)


def _read_output(process: subprocess.Popen[bytes], limit: int, deadline: float) -> str:
    assert process.stdout is not None
    data = bytearray()
    while len(data) < limit:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), limit - len(data))
        if not piece:
            # Discard the output if py-spy failed: the hook, which needs no permission, is asked instead.
            return data.decode(errors="replace") if _succeeds(process, deadline) else ""
        data += piece
    return data.decode(errors="replace")


def _succeeds(process: subprocess.Popen[bytes], deadline: float) -> bool:
    return process.wait(max(0.0, deadline - time.monotonic())) == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN)
    if process.stdout is not None:
        process.stdout.close()
