"""A real Slurm: its jobs are attributed, and their reports add up."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from validation import slurm


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())
def test_jobs_of_a_real_slurm_are_attributed_and_their_reports_add_up() -> None:
    with tempfile.TemporaryDirectory(prefix="rankscope-slurm-", dir="/dev/shm") as name:
        _, checks, page = slurm.measure(Path(name), None, 40.0)
    assert not [check for check in checks if not check.holds], page
