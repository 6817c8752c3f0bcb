"""A sampler on a simulated machine. The test controls the machine's clock; the sampler's threads are real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from testing.waiting import eventually

from rankscope_exporter.gpu.device_sampler import Timing
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.registry import GPU_COLLECTORS

PATIENT = Timing(interval=0.02, deadline=120, reopen_after=0.02)


@pytest.fixture
def sampling(machine) -> Iterator[Callable[..., tuple]]:
    """Return a function that creates a machine and its sampler. Blocking calls wait until `unblock` is set."""
    samplers: list[Sampler] = []
    unblock = threading.Event()

    def make(scenario: str, collectors=GPU_COLLECTORS, timing: Timing = PATIENT, *, in_simulated_time: bool = False):
        m = machine(scenario, sleep=lambda seconds: unblock.wait(60) if seconds > 1 else time.sleep(seconds))
        m.unblock = unblock
        if in_simulated_time:
            timing = replace(timing, unix=m.clock, monotonic=m.clock)
        samplers.append(Sampler(m.driver, collectors, timing=timing))
        samplers[-1].start()
        eventually(lambda: samplers[-1].is_ready)
        return m, samplers[-1]

    yield make
    unblock.set()
    for sampler in samplers:
        sampler.stop()
