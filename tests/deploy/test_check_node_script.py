"""The prolog that checks a node drains it only if a check failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/check_node.sh"


def run(directory: Path, status: int, config: str = "", gpus: str = "0,1") -> subprocess.CompletedProcess[str]:
    """Run the prolog with a check that ends with this status."""
    check = directory / "check"
    check.write_text(f"#!/bin/sh\necho FAILED GPU 0\nexit {status}\n")
    check.chmod(0o755)
    (directory / "config").write_text(f"CHECK={check}\n{config}\n")
    environment = {**os.environ, "RANKSCOPE_CHECK_CONFIG": str(directory / "config"), "SLURM_JOB_GPUS": gpus}
    return subprocess.run(["sh", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("status", "drains"), [(0, 0), (1, 1), (2, 0), (3, 0), (127, 0)])
def test_only_a_failed_check_drains_the_node(tmp_path: Path, status: int, drains: int) -> None:
    assert run(tmp_path, status).returncode == drains


def test_the_administrator_chooses_what_drains(tmp_path: Path) -> None:
    assert run(tmp_path, 3, 'DRAIN="1 3"').returncode == 3
    assert run(tmp_path, 1, "DRAIN=").returncode == 0


def test_what_was_found_is_in_the_log(tmp_path: Path) -> None:
    assert "FAILED GPU 0" in run(tmp_path, 1).stderr


def test_a_job_without_gpus_is_not_checked(tmp_path: Path) -> None:
    ran = run(tmp_path, 1, gpus="")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_check_that_does_not_end_drains_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, 1, "CHECK='sleep 1000'\nLONGEST=1").returncode == 0


@pytest.mark.parametrize("config", [None, "if\n"], ids=["missing", "broken"])
def test_a_configuration_that_cannot_be_read_drains_nothing(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config").write_text(config)
    environment = {**os.environ, "RANKSCOPE_CHECK_CONFIG": str(tmp_path / "config"), "SLURM_JOB_GPUS": "0"}
    ran = subprocess.run(["sh", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0
    assert "/opt/rankscope/bin/rankscope" in ran.stderr  # the default was tried
