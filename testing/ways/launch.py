"""Start `job.py`, alone or as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
JOB = "testing.ways.job"


class JobFailedError(Exception):
    """The job failed. The text is its standard error."""


def launch(ranks: int, steps: int, ways: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    """Return the line of each rank about each way."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANKSCOPE_RUN_DIR": str(run_dir), "PYTHONPATH": path}
    command = [sys.executable, "-m", *torchrun, JOB, str(steps), *ways]
    job = subprocess.run(command, env=environment, cwd=run_dir, capture_output=True, text=True, check=False)
    if job.returncode:
        raise JobFailedError(job.stderr)
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith('{"way"')]
