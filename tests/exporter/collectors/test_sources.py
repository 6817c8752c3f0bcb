"""Each source reads what it shall and nothing else, and publishes what the metrics' contract says."""

from __future__ import annotations

import math
import os
import re
import socket
from pathlib import Path

import pynvml
import pytest

from rankscope_exporter.collectors import COLLECTORS, GPU_SOURCES, clocks, gpu, memory, power, processes, temperature
from rankscope_exporter.collectors.clocks import ThrottleMeter
from rankscope_exporter.collectors.xid import WELL_KNOWN, XidCollector
from rankscope_exporter.nvml.errors import DeviceLostError
from rankscope_exporter.source import Gpu, SourceCollector, Tick

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
GPU0 = Gpu(0, "GPU-0")
TICK = Tick(unix=1000.0, elapsed=1.0)

BUSY = f"""
gpus: 1
timeline: {{0: [{{at: 0, busy: 0.5, throttle: [hw_slowdown], processes: [{{pid: {os.getpid()}, memory: 1 GiB}}]}}]}}"""


def samples(families) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Values and labels beside gpu and uuid, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("gpu", "uuid")}
            assert sample.labels["gpu"] == "0"
            assert sample.labels["uuid"] == "GPU-0"
            found.setdefault(sample.name, []).append((labels, sample.value))
    return found


def published(machine, source, scenario: str = BUSY):
    m = machine(scenario)
    device = m.device()
    m.clock.advance(10)
    return samples(source.families({GPU0: source.reader()(device, TICK)}))


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each GPU metric in the reference."""
    section = METRICS.read_text().split("## GPUs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|[^|]*\|([^|]*)\|", section, re.MULTILINE)
    return {
        name: (kind.strip(), {"gpu", "uuid", *re.findall(r"`(\w+)`", labels.split("(")[0])})
        for name, kind, labels in rows
    }


def test_exactly_the_documented_metrics_are_published(machine):
    m = machine(BUSY)
    device = m.device()
    m.clock.advance(10)
    families = [family for source in GPU_SOURCES for family in source.families({GPU0: source.reader()(device, TICK)})]
    families += XidCollector(type("Counts", (), {"xids": lambda _self: {GPU0: {}}})()).collect()
    found = {
        family.samples[0].name: (family.type, set(family.samples[0].labels)) for family in families if family.samples
    }
    assert found == documented()
    assert all(re.fullmatch(r"[A-Z1].*\.", family.documentation) for family in families)


def test_every_collector_has_a_name_of_its_own_and_one_line_of_help():
    names = [collector.name for collector in COLLECTORS]
    assert len(names) == len(set(names)) == 11
    assert all(collector.help and "\n" not in collector.help for collector in COLLECTORS)


def test_a_source_is_named_like_its_file():
    for source in GPU_SOURCES:
        assert source.families.__module__ == f"rankscope_exporter.collectors.{source.name}"


@pytest.mark.parametrize("source", GPU_SOURCES, ids=lambda source: source.name)
def test_a_gpu_that_is_down_publishes_no_value_but_that_it_is_down(source):
    found = samples(source.families({GPU0: None}))
    assert found == ({"rankscope_gpu_up": [({}, 0.0)]} if source.name == "gpu" else {})


@pytest.mark.parametrize("source", GPU_SOURCES, ids=lambda source: source.name)
def test_what_is_not_supported_is_absent_and_never_nan(machine, source):
    from rankscope_exporter.simulation.gpu_calls import GPU_FUNCTIONS

    identity = ("nvmlDeviceGetUUID", "nvmlDeviceGetPerformanceState")
    faults = ", ".join(f"{symbol}: NOT_SUPPORTED" for symbol in GPU_FUNCTIONS if symbol not in identity)
    found = published(machine, source, f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{faults}}}}}]}}}}")
    values = [value for rows in found.values() for _, value in rows]
    assert not any(math.isnan(value) for value in values)
    assert set(found) == ({"rankscope_gpu_info", "rankscope_gpu_up"} if source.name == "gpu" else set())


def test_the_info_says_what_the_gpu_is_and_where(machine):
    found = published(machine, gpu.SOURCE)
    assert found["rankscope_gpu_up"] == [({}, 1.0)]
    assert found["rankscope_gpu_info"] == [
        (
            {
                "name": "Simulated NVIDIA H100 80GB HBM3",
                "pci_bus_id": "00000000:10:00.0",
                "node": socket.gethostname(),
                "driver_version": "simulated",
                "cuda_version": "13.0",
                "busy_source": "samples",
            },
            1.0,
        )
    ]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ("nvmlDeviceGetSamples: NOT_SUPPORTED", "instantaneous"),
        ("nvmlDeviceGetSamples: NOT_SUPPORTED, nvmlDeviceGetUtilizationRates: NOT_SUPPORTED", ""),
    ],
)
def test_the_info_says_how_busy_time_is_measured(machine, faults, expected):
    found = published(machine, gpu.SOURCE, f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{faults}}}}}]}}}}")
    assert found["rankscope_gpu_info"][0][0]["busy_source"] == expected


def test_a_gpu_that_fails_to_say_its_name_is_up_all_the_same(machine):
    scenario = "{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetName: UNKNOWN}}]}}"
    found = published(machine, gpu.SOURCE, scenario)
    assert found["rankscope_gpu_up"] == [({}, 1.0)]
    assert found["rankscope_gpu_info"][0][0]["name"] == ""


def test_a_gpu_that_is_lost_while_it_says_what_it_is_is_lost(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetName: GPU_IS_LOST}}]}}")
    with pytest.raises(DeviceLostError):
        gpu.SOURCE.reader()(m.device(), TICK)


def test_memory_is_total_used_and_reserved(machine):
    found = published(machine, memory.SOURCE)
    assert found == {
        "rankscope_gpu_memory_total_bytes": [({}, 80 * 2**30)],
        "rankscope_gpu_memory_used_bytes": [({}, 2**30)],
        "rankscope_gpu_memory_reserved_bytes": [({}, 640 * 2**20)],
    }


def test_power_is_watts_and_energy_joules(machine):
    found = published(machine, power.SOURCE)
    assert found["rankscope_gpu_power_watts"] == [({}, pytest.approx(353.5))]
    assert found["rankscope_gpu_power_limit_watts"] == [({}, 700)]
    assert found["rankscope_gpu_energy_joules_total"] == [({}, pytest.approx(3535))]


def test_temperature_and_processes_are_one_value_each(machine):
    assert published(machine, temperature.SOURCE)["rankscope_gpu_temperature_celsius"][0][1] > 32
    assert published(machine, processes.SOURCE) == {"rankscope_gpu_processes": [({}, 1)]}


def test_clocks_are_hertz_by_domain(machine):
    found = published(machine, clocks.SOURCE)
    assert found["rankscope_gpu_clock_max_hertz"] == [({"domain": "sm"}, 1.98e9), ({"domain": "memory"}, 2.619e9)]
    assert [labels for labels, _ in found["rankscope_gpu_clock_hertz"]] == [{"domain": "sm"}, {"domain": "memory"}]


def test_throttled_time_is_integrated_by_reason(machine):
    m = machine("""
        gpus: 1
        timeline:
          0: [{at: 0, busy: 1}, {at: 10, throttle: [hw_slowdown, sw_thermal_slowdown]}, {at: 20, throttle: []}]""")
    device, meter = m.device(), ThrottleMeter()
    for _ in range(30):
        m.clock.advance(1)
        seconds = meter(device, Tick(m.clock(), 1.0)).throttled_seconds
    assert seconds["hw_slowdown"] == seconds["sw_thermal_slowdown"] == 10
    assert seconds["sw_power_cap"] == 0, "a reason exists before it ever held"


def test_an_idle_gpu_is_not_throttled(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, throttle: [applications_clocks_setting]}]}}")
    meter = ThrottleMeter()
    seconds = meter(m.device(), Tick(m.clock(), 5.0)).throttled_seconds
    assert not {"gpu_idle", "applications_clocks_setting"} & set(seconds)
    assert set(seconds.values()) == {0}


def test_well_known_xids_are_there_from_the_start_and_others_with_their_first_event():
    counts = type("Counts", (), {"xids": lambda _self: {GPU0: {79: 2, 999: 1}}})()
    found = samples(XidCollector(counts).collect())["rankscope_gpu_xid_errors_total"]
    values = {int(labels["xid"]): value for labels, value in found}
    assert values[79] == 2
    assert values[999] == 1
    assert values[13] == 0
    assert set(values) == {*WELL_KNOWN, 999}


def test_a_source_asks_for_its_own_quantities_only(machine, monkeypatch):
    m = machine(BUSY)
    device = m.device()
    asked = []
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature"):
        real = getattr(pynvml, name)
        monkeypatch.setattr(
            pynvml, name, lambda *arguments, _real=real: asked.append(_real.__name__) or _real(*arguments)
        )
    temperature.SOURCE.reader()(device, TICK)
    assert asked == ["nvmlDeviceGetTemperature"]


def test_a_collector_publishes_the_last_readings():
    last = type("Last", (), {"readings": lambda _self, _source: {GPU0: 55.0}})()
    collector = SourceCollector(temperature.SOURCE, last)
    assert (collector.name, collector.help) == (temperature.SOURCE.name, temperature.SOURCE.help)
    assert samples(collector.collect()) == {"rankscope_gpu_temperature_celsius": [({}, 55.0)]}
