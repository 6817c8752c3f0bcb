"""Fixtures of the attacks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def shared(run_dir: Path) -> Path:
    """Make the run directory writable for every user, as on a node."""
    run_dir.chmod(0o1777)
    return run_dir
