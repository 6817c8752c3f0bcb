"""The state of the GPUs in a capture: what the exporter has read, and nothing of a driver that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from testing.waiting import eventually

from rankscope_exporter.capture.gpu_state import BYTES, describe_gpus
from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.gpu.device_sampler import Timing
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.registry import GPU_COLLECTORS

SCENARIO = """
gpus: 8
timeline:
  1:
    - {at: 0, busy: 1, memory_used: 20 GiB, temperature: 87, throttle: [sw_thermal_slowdown]}
    - {at: 1, ecc: {uncorrected_dram: 1}, nvlinks_down: 2, xid: 79}
    - {at: 2, processes: [{pid: 4711, memory: 8 GiB}, {pid: 4712, memory: 2 GiB}]}
"""


@pytest.fixture
def sampling(machine) -> Iterator[Any]:
    """Return a function that starts a sampler on a simulated machine. A call that takes long waits for the test."""
    unblock = threading.Event()
    samplers: list[Sampler] = []

    def make(scenario: str, deadline: float = 120.0) -> tuple[Any, Sampler]:
        m = machine(scenario, sleep=lambda seconds: unblock.wait(60) if seconds > 1 else time.sleep(seconds))
        samplers.append(
            Sampler(m.driver, GPU_COLLECTORS, timing=Timing(interval=0.02, deadline=deadline, reopen_after=0.02))
        )
        samplers[-1].start()
        eventually(lambda: samplers[-1].is_ready)
        return m, samplers[-1]

    yield make
    unblock.set()
    for sampler in samplers:
        sampler.stop()


def state_of(text: str, gpu: int) -> str:
    """Return the lines of one GPU."""
    return next(part for part in text.split("\n\n") if part.startswith(f"GPU {gpu} "))


def test_the_state_has_the_content_of_nvidia_smi(sampling) -> None:
    m, sampler = sampling(SCENARIO)
    m.advance(3.0, lambda: any(xids.last for xids in sampler.xids().values()))
    eventually(lambda: "process 4711" in describe_gpus(sampler, {"1"}, [4711], pause=0.0))
    m.clock.advance(30.0)  # ECC errors are read every 15 s
    eventually(lambda: "uncorrected dram 1" in describe_gpus(sampler, {"1"}, [4711], pause=0.0))
    text = describe_gpus(sampler, {"1"}, [4711], pause=0.0)
    assert text.startswith("GPU 1 GPU-")
    state = state_of(text, 1)
    assert "(of the run)" in state.splitlines()[0]
    for expected in (
        "XID 79: 1 since the exporter started, the last at ",
        "processes: 1 of the run's ranks, 1 others, 2.00 GiB",
        "  process 4711, 8.00 GiB",
        "temperature: 87 °C",
        "memory used: 20 GiB",
        "nvlink links active: 16",
        "ecc errors: uncorrected dram 1",
        "row remapping pending: 0",
        "last busy timestamp: 20",
        "gpm pcie: transmit ",
        "pcie link generation: 5",
        "power limit: 700 W",
        "performance state: 0",
        "throttled: sw_thermal_slowdown ",
        "clock: graphics ",
    ):
        assert expected in state, state
    assert "4712" not in text
    assert "XID errors: none" in state_of(text, 0)
    assert len(text.encode()) < BYTES


def test_the_increase_of_counters_shows_what_runs_now(sampling) -> None:
    m, sampler = sampling(SCENARIO)

    def advance() -> None:
        while not done.is_set():
            m.clock.advance(0.1)
            time.sleep(0.01)

    done = threading.Event()
    thread = threading.Thread(target=advance)
    thread.start()
    try:
        eventually(lambda: " (+" in state_of(describe_gpus(sampler, {"1"}, [], pause=0.1), 1).partition("busy: ")[2])
    finally:
        done.set()
        thread.join()


def test_a_gpu_whose_driver_hangs_does_not_answer_and_delays_nothing(sampling) -> None:
    m, sampler = sampling("{gpus: 2, timeline: {1: [{at: 5, blocks: {nvmlDeviceGetTemperature: 60}}]}}", deadline=0.1)
    m.clock.advance(5.0)
    eventually(lambda: "does not answer" in state_of(describe_gpus(sampler, (), [], pause=0.0), 1))
    assert "does not answer" not in state_of(describe_gpus(sampler, (), [], pause=0.0), 0)


def test_without_a_gpu_there_is_no_state(sampling) -> None:
    _, sampler = sampling("gpus: 1")
    sampler.release(60)
    with pytest.raises(UnavailableError, match="handles are released"):
        describe_gpus(sampler, (), [], pause=0.0)
