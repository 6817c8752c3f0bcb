"""A second user of the machine, and the command line as somebody types it, for the attacks on the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STRANGER = 65534
# Imports come first: the interpreter that runs the tests may lie in a home directory that nobody else may enter.
BECOME = """
import ctypes, fcntl, json, os, signal, sys, time
from pathlib import Path
import rankscope.cli.launch, rankscope.cli.living_ranks, rankscope.cli.stacks
from rankscope.record.writer import RankWriter
directory, user = Path(sys.argv[1]), int(sys.argv[2])
def become():
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
def publish(name, **info):
    writer = RankWriter()
    writer.publish(directory, name, {"run": "evil", "rank": "0", "pid": str(os.getpid()), **info})
    return writer
def live():
    print("ready", flush=True)
    sys.stdin.read()
"""


def need_root() -> None:
    """Only root can become a second user."""
    if os.geteuid() != 0:
        pytest.skip("did not run: it needs root, to be two users")


@contextmanager
def process(code: str, run_dir: Path, user: int = STRANGER) -> Iterator[subprocess.Popen[str]]:
    """Python code after BECOME, which lives until the block ends; `live()` is what it comes to."""
    command = [sys.executable, "-c", BECOME + code, str(run_dir), str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def ask(run_dir: Path, *flags: str, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """`rankscope stacks`; `path` is where it may find py-spy."""
    command = [sys.executable, "-m", "rankscope.cli.launch", "stacks", f"--run-dir={run_dir}", *flags]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
