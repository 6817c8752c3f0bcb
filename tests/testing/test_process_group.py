"""Four ranks on the asynchronous device: every check of the job holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from testing.torchrun import environment, forked
from tests.testing.collectives_job import checks

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forked(4, REPOSITORY / "tests/testing/collectives_job.py"),
        env=environment(RANKSCOPE_RUN_DIR=str(tmp_path_factory.mktemp("run"))),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("check", checks())
def test_on_every_rank(job: subprocess.CompletedProcess[str], check: str) -> None:
    held = [json.loads(line) for line in job.stdout.splitlines() if line.startswith('"')]
    assert check in held, job.stderr[-3000:]


def test_it_ends_normally(job: subprocess.CompletedProcess[str]) -> None:
    assert job.returncode == 0, job.stderr[-3000:]
