"""Fixtures of the probes' tests."""

from __future__ import annotations

import pytest
from tests.trainer_hooks.probes.batches import Training

from rankscope.timeline.timeline import Timeline


@pytest.fixture
def training(timeline: Timeline) -> Training:
    return Training(timeline)
