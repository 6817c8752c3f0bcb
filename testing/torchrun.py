"""Jobs of several ranks, started with torchrun, and their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def torchrun(ranks: int, *job: object, options: tuple[str, ...] = ("--standalone",)) -> list[str]:
    """Return the command of a job: a script or `-m` and a module, with arguments."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]
    return [*command, *map(str, job)]


def forked(ranks: int, job: object, *arguments: object) -> list[str]:
    """Return the command of a job, a script, whose ranks torchrun forks: they share one import of torch.

    For jobs whose start, signals and exit are not tested: the ranks end without the interpreter's shutdown.
    """
    launcher = "import torch._dynamo, torch.distributed.run as torchrun; torchrun.main()"
    options = ["--standalone", f"--nproc-per-node={ranks}", "--start-method=fork", "--run-path"]
    return [sys.executable, "-W", "ignore", "-c", launcher, *options, *map(str, (job, *arguments))]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a job whose ranks share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def reports(ranks: int, *job: object, **variables: str) -> list[dict[str, Any]]:
    """Run a script to its end in forked ranks. Return its ranks' reports, by rank."""
    done = subprocess.run(
        forked(ranks, *job), env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == ranks
    return sorted(lines, key=lambda line: int(line["rank"]))


def report(line: object) -> None:
    """Print a line of JSON in one write, so that the ranks' lines do not mix."""
    os.write(1, f"{json.dumps(line)}\n".encode())
