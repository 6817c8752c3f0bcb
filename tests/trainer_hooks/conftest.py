"""What the hook's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope
from rankscope import attach, guard
from rankscope.attach import Attachment
from rankscope.timeline.timeline import Timeline

# The jobs that tests start are scripts, and find what tests share as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture
def attached(run_dir: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attachment]:
    """This process, instrumented with every probe."""
    monkeypatch.setattr(guard, "reraise", True)
    rankscope.instrument()
    attachment = attach.current()
    assert attachment is not None
    yield attachment
    rankscope.uninstrument()


@pytest.fixture
def timeline(attached: Attachment) -> Timeline:
    return attached.timeline
