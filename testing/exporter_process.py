"""The exporter as a process, and requests to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO

from testing import waiting

EXPORTER = (sys.executable, "-m", "rankscope_exporter")
eventually = partial(waiting.eventually, pause=0.1)
"""For conditions that are requests."""


@contextmanager
def exporter_process(
    port: int,
    *flags: str,
    program: Sequence[str] = EXPORTER,
    ready: str = "/-/healthy",
    env: Mapping[str, str] | None = None,
    stderr: int | IO[str] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start an exporter and wait until the page `ready` is 200. It must end by itself on SIGTERM."""
    command = [*program, f"--web.listen-address=127.0.0.1:{port}", *flags]
    with subprocess.Popen(command, stderr=stderr, env=env) as process:
        try:
            eventually(lambda: status(f"http://127.0.0.1:{port}{ready}") == 200)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)


@contextmanager
def exporter(port: int, *flags: str) -> Iterator[str]:
    """Start an exporter and yield its address."""
    with exporter_process(port, *flags):
        yield f"http://127.0.0.1:{port}"


def status(url: str) -> int:
    """Return the status of a page, 0 if there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def metrics(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        return str(answer.read().decode()).splitlines()
