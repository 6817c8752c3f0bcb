"""The load of `rankscope check-node` on simulated GPUs: they are busy, and their rates follow from their clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.timeline import Timeline

SETTLE, WORK = 1.1, 1.5  # seconds: a GPU is idle if nothing ran in the last second
OPERATIONS = 5e5  # per clock: 0.99e15 a second at the clock of an H100
COPIED = 0.9  # ratio of the bus's bandwidth that a copy reaches


def work(simulated: SimulatedDriver, indices: Sequence[int], report: Callable[[dict[str, Any]], object]) -> None:
    """Let these GPUs work from now on, and report the load of each as node_check/load.py does."""
    now = simulated.now()
    for index in indices:
        gpu = simulated.gpus[index]
        states, xids = gpu.timeline.states, gpu.timeline.xids
        busy = [(at, replace(state, busy=1.0)) for at, state in states if at > now]
        before = [(at, state) for at, state in states if at <= now]
        gpu.timeline = Timeline([*before, (now, replace(gpu.state(now), busy=1.0)), *busy], xids)
    time.sleep(SETTLE)
    began = time.monotonic()
    time.sleep(WORK)
    for index in indices:
        report({"gpu": index, "rates": _rates(simulated, index), "spans": [(began, time.monotonic())]})


def _rates(simulated: SimulatedDriver, index: int) -> dict[str, float]:
    gpu, now = simulated.gpus[index], simulated.now()
    bus = 2 * gpu.model.memory_clock * 1e6 * gpu.model.memory_bus / 8
    return {"matmul": gpu.sm_clock(now) * 1e6 * OPERATIONS, "memory_bandwidth": COPIED * bus * gpu.state(now).speed}
