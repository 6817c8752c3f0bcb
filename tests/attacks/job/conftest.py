"""A process that ends without a hook in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope
from rankscope import guard


@pytest.fixture
def guest(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that instrument this process: as in production, an error of the hook's costs a warning."""
    monkeypatch.setattr(guard, "reraise", False)
    monkeypatch.setenv("RANKSCOPE_QUIET", "1")
    yield
    rankscope.uninstrument()
