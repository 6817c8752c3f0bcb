"""Start `job.py`, alone or in ranks that torchrun forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testing.torchrun import environment, forked

REPOSITORY = Path(__file__).parents[2]
JOB = Path(__file__).parent / "job.py"


class JobFailedError(Exception):
    """The job failed. The text is its standard error."""


def launch(ranks: int, steps: int, ways: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    """Return the line of each rank about each way."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = environment(RANKSCOPE_RUN_DIR=str(run_dir), PYTHONPATH=path)
    command = forked(ranks, JOB, steps, *ways) if ranks > 1 else [sys.executable, str(JOB), str(steps), *ways]
    job = subprocess.run(command, env=variables, cwd=run_dir, capture_output=True, text=True, check=False)
    if job.returncode:
        raise JobFailedError(job.stderr)
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith('{"way"')]
