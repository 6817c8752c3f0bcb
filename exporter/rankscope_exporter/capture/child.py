"""A child process for what may block or take too much memory: a file on a dead network file system, a hostile dump."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.child import Child

SECONDS = 20.0
MEMORY = 2**30
"""Bytes of address space of a child."""


def run_child(module: str, *arguments: object, seconds: float = SECONDS) -> str:
    """Return the text of a module that `serve`s, for these arguments. Raise UnavailableError, also after `seconds`."""
    try:
        process = Child([sys.executable, "-m", module, json.dumps(arguments)])
    except OSError as error:
        raise UnavailableError(f"cannot start a process: {error.strerror}") from error
    with process as child:
        has_ended = child.wait(time.monotonic() + seconds)
        answer = {name: value for line in child.lines for name, value in line.items()}
        if not has_ended:
            why = "a file system may not answer" if answer else "there is no CPU time for it"
            raise UnavailableError(f"no result within {seconds:g} s: {why}")
        if "text" not in answer:
            status = f"the process that reads it has failed with status {child.status}"
            raise UnavailableError(answer.get("unavailable", status))
        return str(answer["text"])


def limit_memory(limit: int) -> None:
    """Limit this process's address space in bytes, and let the kernel end it before any other if memory runs out."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve(function: Callable[..., str]) -> None:
    """Answer `run_child` with what a function returns for its arguments, as the process that is ended first."""
    # What takes long after this line is not the start of the interpreter, on a node without idle CPUs.
    os.write(1, b'{"has_started": true}\n')
    os.nice(19)
    limit_memory(MEMORY)
    try:
        answer = {"text": function(*json.loads(sys.argv[1])).encode(errors="replace").decode()}
    except UnavailableError as error:
        answer = {"unavailable": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)
