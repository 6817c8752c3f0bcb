"""A second user of the machine, and the command line as a user types it, for the attacks on the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.programs import Program, python, running
from testing.users import NOBODY

# Imports come first: the interpreter that runs the tests may be in a home directory that no other user may enter.
BECOME = """
import fcntl, os, signal, sys
from functools import partial
from pathlib import Path
import rankscope.cli.commands, rankscope.cli.launch, rankscope.cli.living_ranks, rankscope.cli.stacks
import testing.records, testing.users
directory, user = Path(sys.argv[1]), int(sys.argv[2])
become = partial(testing.users.become, user)
def publish(name, **info):
    return testing.records.publish(directory, name, **{"run": "evil", "pid": str(os.getpid()), **info})[0]
def live():
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(code: str, run_dir: Path, user: int = NOBODY) -> Iterator[Program]:
    """Run Python code after BECOME until the block ends; it ends with `live()`."""
    with running(*python(BECOME + code, run_dir, user)) as started:
        yield started


def ask(run_dir: Path, *flags: str, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """`rankscope stacks`; `path` is where it may find py-spy."""
    command = [sys.executable, "-m", "rankscope.cli.launch", "stacks", f"--run-dir={run_dir}", *flags]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
