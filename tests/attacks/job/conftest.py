"""Fixtures of the attacks on a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope
from rankscope import guard


@pytest.fixture
def guest(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Log errors of the hook, as in production, and remove the hook after the test."""
    monkeypatch.setattr(guard, "reraise", False)
    monkeypatch.setenv("RANKSCOPE_QUIET", "1")
    yield
    rankscope.uninstrument()
