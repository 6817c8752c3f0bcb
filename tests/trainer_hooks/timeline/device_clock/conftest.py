"""Fixtures with a timeline on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from testing.own_record import installed
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    Cuda,
    Gpu,
    started,
)

from rankscope.probes import device_time, device_wait
from rankscope.record.writer import RankWriter
from rankscope.timeline import device_clock
from rankscope.timeline.device_clock import DeviceClock
from rankscope.timeline.timeline import Timeline


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def timeline(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    monkeypatch.setattr("rankscope.guard.reraise", True)
    return Timeline(RankWriter(), gpu.host)


@pytest.fixture
def clock(gpu: Gpu, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    """Make a clock that measures every step."""
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.0)
    return started(timeline, gpu)


@pytest.fixture
def cuda(timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Replace torch.cuda by the simulated device, watch it and measure every step; startup is over."""
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    stand_in = Cuda(gpu)
    for name in ("is_initialized", "is_current_stream_capturing", "current_stream", "Event", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    with installed(timeline, device_time, device_wait):
        timeline.step()
        yield stand_in
