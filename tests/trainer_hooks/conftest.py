"""Fixtures of the hook's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from testing import own_record
from testing.leaving import leave

import rankscope
from rankscope import guard
from rankscope.attach import Attachment
from rankscope.timeline.timeline import Timeline

# The tests' jobs are scripts and import the same modules as the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture
def hook_fails_loudly(run_dir: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise the hook's own errors, and remove the hook after the test."""
    monkeypatch.setattr(guard, "reraise", True)
    yield
    rankscope.uninstrument()


@pytest.fixture
def attached(hook_fails_loudly: None) -> Attachment:
    """Instrument this process with every probe."""
    rankscope.instrument()
    return own_record.attachment()


@pytest.fixture
def timeline(attached: Attachment) -> Timeline:
    return attached.timeline


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that loads a module with these attributes, as the job does."""

    def loaded(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return loaded


@pytest.fixture
def process_group() -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()
