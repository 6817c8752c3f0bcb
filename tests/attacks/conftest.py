"""A run directory that every user may write to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def shared(run_dir: Path) -> Path:
    """A run directory as the node's is."""
    run_dir.chmod(0o1777)
    return run_dir
