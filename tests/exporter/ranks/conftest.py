"""The alignment of the ranks in the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.simulated_job import Aligning


@pytest.fixture
def alignment(run_dir: Path) -> Aligning:
    return Aligning(run_dir)
