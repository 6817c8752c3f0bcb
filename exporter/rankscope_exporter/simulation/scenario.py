"""A simulated machine from a number of GPUs or a YAML file. An error in the file is reported in one line with its key.

gpus: 4
model: {name: NVIDIA H100 80GB HBM3, memory: 80 GiB, power_idle: 70, power_max: 700,   # watts
        sm_clock: 1980, memory_clock: 2619}                                            # MHz
                                  # or: T4, or: {like: A100, mig: [3g.20gb, 1g.5gb]}; defaults are an H100's
models: {3: A100}                 # other models, by GPU
machine: 1                        # part of the GPUs' UUIDs, to distinguish several machines (default: 0)
follow_ranks: true                # GPUs are busy according to ranks that name them in their record (default: false)
processes_dir: /dev/shm/holders   # processes announced there hold memory (hold.py)
changes_dir: /dev/shm/changes     # changes to GPUs at run time (changes.py)
driver:                           # seconds from the start; by default the driver is loaded
  - {at: 0, loaded: false}
  - {at: 5, loaded: true}
timeline:                         # by GPU; each value holds until a later entry changes it
  0:
    - {at: 0, busy: 0.9, memory_used: 20 GiB}
    - {at: 30, busy: 0, waiting: 1, throttle: [sw_thermal_slowdown], temperature: 87}
  2:
    - {at: 10, processes: [{pid: 4711, memory: 8 GiB, contexts: [compute, graphics]}]}
    - {at: 20, xid: 79, lost: true}                     # an XID occurs once
    - {at: 30, ecc: {uncorrected_dram: 1}, fields: {144: 1}, nvlinks_down: 2}   # field values by field id
    - {at: 35, speed: 0.7, pcie_generation: 1, pcie_width: 8, persistence: false}   # speed: ratio of the SM clock
    - {at: 40, lost: false, fails: {nvmlDeviceGetPowerUsage: UNKNOWN}}
    - {at: 60, blocks: {nvmlDeviceGetTemperature: 30}}  # the call takes 30 seconds
    - {at: 90, ranks_busy: 0.4, ranks_memory: 0.9}      # shares of the ranks' time and of memory; defaults: 1 and 0.6
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rankscope_exporter.documents import read_document
from rankscope_exporter.gpu.nvml.device import CLOCK_EVENT_REASONS
from rankscope_exporter.gpu.nvml.errors import CODES
from rankscope_exporter.gpu.nvml.health import ERROR_KINDS
from rankscope_exporter.simulation.gpu_calls import SYMBOLS
from rankscope_exporter.simulation.mig import PROFILE
from rankscope_exporter.simulation.models import H100, MODELS, GpuModel
from rankscope_exporter.simulation.timeline import SimulatedProcess, State, Timeline
from rankscope_exporter.simulation.values import (
    ScenarioError,
    boolean,
    choices,
    items,
    mapping,
    number,
    share,
    size,
    text,
    whole_number,
)

MAX_GPUS = 64
CONTEXTS = ("compute", "graphics")


@dataclass(frozen=True)
class Scenario:
    """A simulated machine: its GPUs, their activity over time, and their faults."""

    timelines: tuple[Timeline, ...]
    """One per GPU."""
    machine: int = 0
    model: GpuModel = H100
    models: Mapping[int, GpuModel] = field(default_factory=dict)
    """Models of single GPUs, by index."""
    follow_ranks: bool = True
    processes_dir: Path | None = None
    changes_dir: Path | None = None
    driver: tuple[tuple[float, bool], ...] = ((0.0, True),)
    """Pairs of a time in seconds and whether the driver is loaded from then on."""


def load_scenario(argument: str) -> Scenario:
    """Return the scenario of `--simulate`: a number of idle GPUs that follow ranks, or a file. Raises DocumentError."""
    if re.fullmatch(r"\d+", argument):
        return Scenario(_idle(_gpus("GPUs", int(argument))))
    return read_document(Path(argument), "YAML", yaml.safe_load, parse_scenario)


def parse_scenario(document: object) -> Scenario:
    """Parse a YAML document into a scenario. Raises ScenarioError with the key."""
    keys = {"gpus", "machine", "model", "models", "follow_ranks", "processes_dir", "changes_dir", "driver", "timeline"}
    values = mapping("the scenario", document, keys)
    if "gpus" not in values:
        raise ScenarioError("gpus: missing number of GPUs")
    count = _gpus("gpus", values["gpus"])
    timelines = list(_idle(count))
    for index, entries in _by_gpu("timeline", values, count):
        timelines[index] = _timeline(f"timeline.{index}", entries)
    return Scenario(
        timelines=tuple(timelines),
        machine=whole_number("machine", values.get("machine", 0)),
        model=_model("model", values.get("model", {})),
        models={index: _model(f"models.{index}", given) for index, given in _by_gpu("models", values, count)},
        follow_ranks=boolean("follow_ranks", values.get("follow_ranks", False)),
        processes_dir=_directory("processes_dir", values),
        changes_dir=_directory("changes_dir", values),
        driver=_driver(values.get("driver", [])),
    )


def parse_process(location: str, value: object) -> SimulatedProcess:
    """Parse a process on a GPU. Raises ScenarioError."""
    values = mapping(location, value, {"pid", "memory", "contexts"})
    pid = values.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        raise ScenarioError(f"{location}.pid: {pid!r} is not a process id")
    contexts = choices(f"{location}.contexts", values.get("contexts", ["compute"]), CONTEXTS)
    return SimulatedProcess(pid, size(f"{location}.memory", values.get("memory", 0)), contexts)


def parse_change(location: str, value: object) -> tuple[State, int | None]:
    """Parse a GPU's state without a time, and its XID if it has one. Raises ScenarioError."""
    values = mapping(location, value, {*_STATE, "xid"})
    xid = whole_number(f"{location}.xid", values["xid"]) if "xid" in values else None
    return _changed(State(), location, values), xid


def _by_gpu(key: str, values: Mapping[Any, Any], count: int) -> Iterable[tuple[int, Any]]:
    """Yield the index and the value of each GPU that is named. Raises ScenarioError."""
    for index, given in mapping(key, values.get(key, {})).items():
        if type(index) is not int or not 0 <= index < count:
            raise ScenarioError(f"{key}.{index}: no such GPU among {count}")
        yield index, given


def _idle(count: int) -> tuple[Timeline, ...]:
    return tuple(Timeline([(0.0, State())]) for _ in range(count))


def _directory(key: str, values: Mapping[Any, Any]) -> Path | None:
    return Path(text(key, values[key])) if key in values else None


def _changed(state: State, location: str, values: Mapping[Any, Any]) -> State:
    return replace(
        state, **{key: _STATE[key](f"{location}.{key}", given) for key, given in values.items() if key in _STATE}
    )


def _timeline(location: str, entries: object) -> Timeline:
    state, states, xids = State(), [(0.0, State())], []
    for where, at, values in _entries(location, entries, {*_STATE, "xid"}):
        state = _changed(state, where, values)
        states.append((at, state))
        if "xid" in values:
            xids.append((at, whole_number(f"{where}.xid", values["xid"])))
    return Timeline(states, xids)


def _driver(entries: object) -> tuple[tuple[float, bool], ...]:
    states = [(0.0, True)]
    for where, at, values in _entries("driver", entries, {"loaded"}):
        states.append((at, boolean(f"{where}.loaded", values.get("loaded", True))))
    return tuple(states)


def _entries(location: str, entries: object, keys: set[str]) -> Iterable[tuple[str, float, Mapping[Any, Any]]]:
    """Yield each entry's location, time and other values. Raises ScenarioError if times decrease."""
    last = 0.0
    for index, entry in enumerate(items(location, entries)):
        where = f"{location}[{index}]"
        values = dict(mapping(where, entry, {"at", *keys}))
        at = number(f"{where}.at", values.pop("at", None))
        if at < last:
            raise ScenarioError(f"{where}.at: {at:g} is before the previous entry ({last:g})")
        last = at
        yield where, at, values


def _model(location: str, value: object) -> GpuModel:
    """Parse a model: the name of one of MODELS, or changes to one."""
    values = {"like": value} if isinstance(value, str) else mapping(location, value, {"like", *_MODEL})
    like = text(location, values.get("like", "H100"))
    if like not in MODELS:
        raise ScenarioError(f"{location}: unknown {like!r}; known: {', '.join(MODELS)}")
    changes = {key: _MODEL[key](f"{location}.{key}", given) for key, given in values.items() if key != "like"}
    return replace(MODELS[like], **changes)


def _profiles(location: str, value: object) -> tuple[str, ...]:
    for profile in items(location, value):
        if not PROFILE.fullmatch(text(location, profile)):
            raise ScenarioError(f"{location}: {profile!r} is not a MIG profile, such as 1g.10gb")
    return tuple(items(location, value))


def _gpus(location: str, value: object) -> int:
    count = whole_number(location, value)
    if not 1 <= count <= MAX_GPUS:
        raise ScenarioError(f"{location}: {count} is not between 1 and {MAX_GPUS}")
    return count


def _each(parse: Callable[[str, object], Any], keys: set[str]) -> Callable[[str, object], dict[str, Any]]:
    """Return a parser of a mapping with some of these keys, whose values `parse` reads."""
    return lambda location, value: {
        key: parse(f"{location}.{key}", given) for key, given in mapping(location, value, keys).items()
    }


def _code(location: str, value: object) -> int:
    code = CODES.get(value) if isinstance(value, str) else None
    return whole_number(location, value) if code is None else code


def _fields(location: str, value: object) -> dict[int, int]:
    values = mapping(location, value)
    return {
        whole_number(location, field): whole_number(f"{location}.{field}", given) for field, given in values.items()
    }


_MODEL: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("power_idle", "power_max", "sm_clock", "memory_clock"), number),
    "name": text,
    "memory": size,
    "nvlinks": whole_number,
    "mig": _profiles,
}
_STATE: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("busy", "waiting", "ranks_busy", "ranks_memory", "speed"), share),
    **dict.fromkeys(("pcie_generation", "pcie_width", "nvlinks_down"), whole_number),
    **dict.fromkeys(("persistence", "lost"), boolean),
    "memory_used": size,
    "temperature": number,
    "throttle": lambda location, value: choices(location, value, tuple(CLOCK_EVENT_REASONS.values())),
    "processes": lambda location, value: tuple(
        parse_process(f"{location}[{index}]", entry) for index, entry in enumerate(items(location, value))
    ),
    "ecc": _each(whole_number, {f"{kind}_{location}" for kind in ERROR_KINDS for location in ("dram", "sram")}),
    "fields": _fields,
    "fails": _each(_code, {*SYMBOLS}),
    "blocks": _each(number, {*SYMBOLS}),
}
