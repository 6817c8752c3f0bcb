"""Reads of a device's values, with `meta` as the device: which are waits, without changing the tensor's methods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from testing.own_record import seconds, value

from rankscope import guard
from rankscope.guard import Guard
from rankscope.probes import device_wait
from rankscope.probes.device_wait import methods
from rankscope.probes.tensor_methods import TensorMethods
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    monkeypatch.setattr(guard, "reraise", True)
    timeline = Timeline(RankWriter())
    reads = TensorMethods(methods(timeline), Guard("device_wait", lambda _: None), lambda: True)
    reads.poll()
    timeline.step()
    yield timeline
    reads.remove()


@pytest.mark.parametrize("method", device_wait.METHODS)
def test_reading_a_devices_value_is_a_wait_for_it(timeline: Timeline, method: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):  # a meta tensor has no value
        getattr(torch.zeros(1, device="meta"), method)()
    assert value(timeline, "device_waits") == 1
    assert seconds(timeline, layout.DEVICE_WAIT) > 0
    assert timeline.open_phases == (layout.OTHER, None)


def test_reading_the_hosts_value_is_not_a_wait(timeline: Timeline) -> None:
    assert torch.ones(1).item() == 1
    assert torch.ones(2).tolist() == [1, 1]
    assert torch.ones(1).cpu().is_cpu
    assert value(timeline, "device_waits") == 0


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built for CUDA")
def test_a_cpu_build_of_torch_has_no_device_to_wait_for(timeline: Timeline) -> None:
    synchronize = torch.cuda.synchronize
    assert device_wait.install(timeline, Guard("device_wait", lambda _: None)) == []
    assert torch.cuda.synchronize is synchronize
