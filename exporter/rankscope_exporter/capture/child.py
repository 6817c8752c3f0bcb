"""A child process for what may block or take too much memory: a file on a dead network file system, a hostile dump.

A process that waits for such a file system cannot be ended. So it is abandoned, and no thread of the exporter waits.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from rankscope_exporter.capture.source import UnavailableError

SECONDS = 20.0
MEMORY = 2**30
"""Bytes of address space of a child."""
READ_BYTES = 65536
STARTED = b"\n"
"""What a child prints first: what takes long then is not the start of the interpreter, on a node without idle CPUs."""
UNAVAILABLE = 3
"""The exit status of a child that has nothing to add. Its output is the reason."""


def run_child(module: str, *arguments: object, seconds: float = SECONDS) -> str:
    """Return what a module prints, given arguments in JSON. Raise UnavailableError, also after `seconds`."""
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    try:
        child = subprocess.Popen(  # noqa: S603 - a module of this package
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise UnavailableError(f"cannot start a process: {error.strerror}") from error
    parts: list[bytes] = []
    reader = Thread(target=_collect, args=(child, parts), name="capture-child", daemon=True)
    reader.start()
    reader.join(seconds)
    if reader.is_alive():
        child.kill()  # the reader reaps it once it has ended
        why = "a file system may not answer" if parts else "there is no CPU time for it"
        raise UnavailableError(f"no result within {seconds:g} s: {why}")
    text = b"".join(parts).removeprefix(STARTED).decode(errors="replace")
    if child.returncode == UNAVAILABLE:
        raise UnavailableError(text)
    if child.returncode != 0:
        raise UnavailableError(f"the process that reads it has failed with status {child.returncode}")
    return text


def _collect(child: subprocess.Popen[bytes], parts: list[bytes]) -> None:
    with child:
        while part := os.read(child.stdout.fileno(), READ_BYTES):  # type: ignore[union-attr]
            parts.append(part)


def limit_memory(limit: int) -> None:
    """Limit this process's address space in bytes, and let the kernel end it before any other if memory runs out."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve(function: Callable[..., str]) -> None:
    """Print what a function returns for the arguments of `run_child`, as the process that is ended first."""
    os.write(1, STARTED)
    os.nice(19)
    limit_memory(MEMORY)
    try:
        text, status = function(*json.loads(sys.argv[1])), 0
    except UnavailableError as error:
        text, status = str(error), UNAVAILABLE
    sys.stdout.buffer.write(text.encode(errors="replace"))
    sys.stdout.flush()
    os._exit(status)
