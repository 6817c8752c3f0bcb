"""The flat file of a scenario that the C library maps, with the layout of the structs in table.h."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from rankscope_exporter.simulation import gpu as physics
from rankscope_exporter.simulation.gpu_calls import BITS
from rankscope_exporter.simulation.library import CUDA_VERSION, DRIVER_VERSION
from rankscope_exporter.simulation.scenario import Scenario
from rankscope_exporter.simulation.timeline import State, Timeline
from rankscope_exporter.simulation.values import ScenarioError

MAGIC = b"RSNVML01"
HEADER = struct.Struct("8sd8q96s80s6q13d")
GPU = struct.Struct("96s32s4q")
SEGMENT = struct.Struct("6d7q")
PROCESS = struct.Struct("4q")
FAULT = struct.Struct("64sqd")
XID = struct.Struct("dq")
LOAD = struct.Struct("dq")


class Tables:
    """Records by kind. Other records refer to them by index."""

    def __init__(self, gpus: list[physics.SimulatedGpu]) -> None:
        self.gpus: list[bytes] = []
        self.segments: list[bytes] = []
        self.processes: list[bytes] = []
        self.faults: list[bytes] = []
        self.xids: list[bytes] = []
        for gpu in gpus:
            self._add_gpu(gpu)

    def _add_gpu(self, gpu: physics.SimulatedGpu) -> None:
        timeline = gpu.timeline
        ranges = len(self.segments), len(timeline.states), len(self.xids), len(timeline.xids)
        self.gpus.append(GPU.pack(gpu.uuid.encode(), gpu.pci_bus_id.encode(), *ranges))
        self.xids += [XID.pack(at, code) for at, code in timeline.xids]
        for at, state in timeline.states:
            self._add_segment(gpu, at, state)

    def _add_segment(self, gpu: physics.SimulatedGpu, at: float, state: State) -> None:
        processes = [
            PROCESS.pack(process.pid, process.memory, "compute" in process.contexts, "graphics" in process.contexts)
            for process in state.processes
        ]
        faults = [
            FAULT.pack(symbol.encode(), state.fails.get(symbol, 0), state.blocks.get(symbol, 0.0))
            for symbol in {**state.fails, **state.blocks}
        ]
        busy, waiting = (0.0, 0.0) if state.lost else (state.busy, state.waiting)
        before = _before(gpu.timeline, at)
        self.segments.append(
            SEGMENT.pack(
                *(at, busy, waiting, *before, math.nan if state.temperature is None else state.temperature),
                *(gpu.memory_used(at), sum(BITS[reason] for reason in state.throttle), state.lost),
                *(len(self.processes), len(processes), len(self.faults), len(faults)),
            )
        )
        self.processes += processes
        self.faults += faults


def scenario_table(scenario: Scenario, start_unix: float) -> bytes:
    """Return the file's content for a scenario that starts at this unix time.

    Raises ScenarioError for a scenario that it cannot represent: with external input, several models, or another speed.
    """
    has_speed = any(state.speed != 1 for timeline in scenario.timelines for _, state in timeline.states)
    for key in ("follow_ranks", "processes_dir", "models", "speed"):
        if has_speed if key == "speed" else getattr(scenario, key):
            raise ScenarioError(f"{key}: not supported by the C library; use rankscope_exporter.simulation")
    gpus = [
        physics.SimulatedGpu(index, scenario.model, timeline, start_unix)
        for index, timeline in enumerate(scenario.timelines)
    ]
    tables = Tables(gpus)
    loads = [LOAD.pack(at, loaded) for at, loaded in scenario.driver]
    parts = [tables.gpus, tables.segments, tables.processes, tables.faults, tables.xids, loads]
    offsets = list(_offsets(b"".join(part) for part in parts))
    counted = (len(gpus), *offsets[:5], len(loads), offsets[5])
    header = HEADER.pack(MAGIC, start_unix, *counted, *_constants(gpus[0]))
    return header + b"".join(record for part in parts for record in part)


def _constants(gpu: physics.SimulatedGpu) -> tuple[bytes | int | float, ...]:
    """Return the rest of the header. It has all constants, so that the C library cannot use different ones."""
    model = gpu.model
    not_throttling = sum(BITS[reason] for reason in physics.NO_THROTTLING)
    return (
        *(gpu.name.encode()[:95], DRIVER_VERSION.encode(), CUDA_VERSION, model.memory, gpu.memory_reserved),
        *(BITS["gpu_idle"], not_throttling, physics.RING_DEPTH),
        *(model.power_idle, model.power_max, model.sm_clock, model.memory_clock),
        *(physics.SAMPLE_PERIOD, physics.POWER_WINDOW, physics.HEAT_WINDOW),
        *(physics.COMPUTING_POWER, physics.WAITING_POWER, physics.IDLE_TEMPERATURE, physics.FULL_LOAD_HEATING),
        *(physics.IDLE_SM_CLOCK, physics.THROTTLED_CLOCK),
    )


def _offsets(parts: Iterable[bytes]) -> Iterable[int]:
    offset = HEADER.size
    for part in parts:
        yield offset
        offset += len(part)


def _before(timeline: Timeline, at: float) -> tuple[float, float]:
    spent = timeline.seconds(at)
    return spent.computing, spent.waiting
