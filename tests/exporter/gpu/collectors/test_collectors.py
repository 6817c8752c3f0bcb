"""Each collector exports metrics that follow the rules."""

from __future__ import annotations

import importlib
import math
import os
import re

import pynvml
import pytest

from rankscope_exporter.gpu.collector import Gpu, Tick
from rankscope_exporter.gpu.collectors import gpu, process, processes, temperature
from rankscope_exporter.gpu.collectors.clocks import ThrottleMeter
from rankscope_exporter.gpu.collectors.xid import METRICS as XID_METRICS
from rankscope_exporter.gpu.collectors.xid import WELL_KNOWN, XidCollector
from rankscope_exporter.gpu.nvml.errors import DeviceLostError
from rankscope_exporter.gpu.nvml.throttle import clock_event_seconds
from rankscope_exporter.gpu.xid_watcher import Xids
from rankscope_exporter.ranks.collectors.findings import CULPRIT_RUNS
from rankscope_exporter.registry import (
    COLLECTORS,
    EXPORTER_METRICS,
    GPU_COLLECTORS,
    GPU_METRICS,
    RANK_COLLECTORS,
    RANK_METRICS,
)

GPU0 = Gpu(0, "GPU-0")
TICK = Tick(unix=1000.0, elapsed=1.0)

BUSY = f"""
gpus: 1
timeline: {{0: [{{at: 0, busy: 0.5, throttle: [hw_slowdown], processes: [{{pid: {os.getpid()}, memory: 1 GiB}}]}}]}}"""


def samples(families) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels (without gpu and uuid) and values by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("gpu", "uuid")}
            assert sample.labels["gpu"] == "0"
            assert sample.labels["uuid"] == "GPU-0"
            found.setdefault(sample.name, []).append((labels, sample.value))
    return found


def published(machine, collector, scenario: str = BUSY):
    m = machine(scenario)
    device = m.device()
    m.clock.advance(10)
    return samples(collector.families({GPU0: collector.reader()(device, TICK)}))


def test_all_declared_metrics_and_no_others_are_exported_by_some_gpu(machine):
    published_names = set()
    busy = f"{{at: 0, busy: 1, processes: [{{pid: {os.getpid()}}}]}}"
    left_idle = "{at: 0}, {at: 2, memory_used: 8 GiB}"
    for model, timeline in (("H100", busy), ("{like: A100, mig: [1g.5gb]}", busy), ("T4", busy), ("T4", left_idle)):
        m = machine(f"{{gpus: 1, model: {model}, timeline: {{0: [{timeline}]}}}}")
        device, readers = m.device(), {collector: collector.reader() for collector in GPU_COLLECTORS}
        for elapsed in (0.0, 1.0, 1.0):
            m.clock.advance(1)
            readings = {collector: readers[collector](device, Tick(m.clock(), elapsed)) for collector in GPU_COLLECTORS}
        for collector, reading in readings.items():
            published_names |= samples(collector.families({GPU0: reading})).keys()
    published_names |= {CULPRIT_RUNS.name, *(metric.name for metric in XID_METRICS)}  # not by a driver call
    assert published_names == {metric.name for metric in GPU_METRICS}


def test_declarations_follow_the_naming_rules():
    declared = [*GPU_METRICS, *RANK_METRICS, *EXPORTER_METRICS]
    assert len({metric.name for metric in declared}) == len(declared)
    for metric in declared:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert re.fullmatch(r"(?s)[A-Z1].*\.", metric.help)
        assert len(set(metric.labels)) == len(metric.labels)
    assert all(metric.source and metric.labels[:2] == ("gpu", "uuid") for metric in GPU_METRICS)


def test_every_collector_has_a_unique_name_and_one_line_of_help():
    names = [collector.name for collector in COLLECTORS]
    assert len(names) == len(set(names))
    assert all(collector.help and "\n" not in collector.help for collector in COLLECTORS)


def test_a_collector_has_the_name_of_its_file():
    for collector in GPU_COLLECTORS:
        assert importlib.import_module(f"rankscope_exporter.gpu.collectors.{collector.name}").COLLECTOR is collector
    for collector in RANK_COLLECTORS:
        assert collector.__module__ == f"rankscope_exporter.ranks.collectors.{collector.name}"


@pytest.mark.parametrize("collector", GPU_COLLECTORS, ids=lambda collector: collector.name)
def test_a_gpu_that_is_down_exports_only_that(collector):
    found = samples(collector.families({GPU0: None}))
    assert found == ({"rankscope_gpu_up": [({}, 0.0)]} if collector.name == "gpu" else {})


@pytest.mark.parametrize("collector", GPU_COLLECTORS, ids=lambda collector: collector.name)
def test_unsupported_values_are_absent_and_never_nan(machine, collector):
    from rankscope_exporter.simulation.symbols import GPU_FUNCTIONS

    faults = ", ".join(f"{symbol}: NOT_SUPPORTED" for symbol in GPU_FUNCTIONS if symbol != "nvmlDeviceGetUUID")
    found = published(machine, collector, f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{faults}}}}}]}}}}")
    values = [value for rows in found.values() for _, value in rows]
    assert not any(math.isnan(value) for value in values)
    assert set(found) == ({"rankscope_gpu_info", "rankscope_gpu_up"} if collector.name == "gpu" else set())


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ("nvmlDeviceGetSamples: NOT_SUPPORTED", "instantaneous"),
        ("nvmlDeviceGetSamples: NOT_SUPPORTED, nvmlDeviceGetUtilizationRates: NOT_SUPPORTED", ""),
    ],
)
def test_the_info_has_the_source_of_busy_time(machine, faults, expected):
    found = published(machine, gpu.COLLECTOR, f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{faults}}}}}]}}}}")
    assert found["rankscope_gpu_info"][0][0]["busy_source"] == expected


def test_a_gpu_that_fails_to_report_its_name_is_up(machine):
    scenario = "{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetName: UNKNOWN}}]}}"
    found = published(machine, gpu.COLLECTOR, scenario)
    assert found["rankscope_gpu_up"] == [({}, 1.0)]
    assert found["rankscope_gpu_info"][0][0]["name"] == ""


def test_a_gpu_lost_while_reading_its_identity_is_lost(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetName: GPU_IS_LOST}}]}}")
    with pytest.raises(DeviceLostError):
        gpu.COLLECTOR.reader()(m.device(), TICK)


def test_temperatures_of_gpus_with_thresholds_and_with_margins(machine):
    hot = "timeline: {0: [{at: 0, temperature: 80}]}"
    old = published(machine, temperature.COLLECTOR, f"{{gpus: 1, model: A100, {hot}}}")
    assert old["rankscope_gpu_temperature_celsius"] == old["rankscope_gpu_memory_temperature_celsius"] == [({}, 80)]
    assert ({"threshold": "slowdown"}, 89) in old["rankscope_gpu_temperature_threshold_celsius"]
    assert "rankscope_gpu_temperature_margin_celsius" not in old
    new = published(machine, temperature.COLLECTOR, f"{{gpus: 1, {hot}}}")
    assert new["rankscope_gpu_temperature_margin_celsius"] == [({}, 9)]
    assert ({"threshold": "shutdown"}, -8) in new["rankscope_gpu_temperature_margin_threshold_celsius"]
    assert "rankscope_gpu_temperature_threshold_celsius" not in new


def test_memory_without_a_sensor_has_no_temperature(machine):
    found = published(machine, temperature.COLLECTOR, "{gpus: 1, timeline: {0: [{at: 0, fields: {82: 0}}]}}")
    assert "rankscope_gpu_memory_temperature_celsius" not in found


def test_processes_are_counted_with_their_total_memory(machine):
    both = "{pid: 5, memory: 1 GiB}, {pid: 6, memory: 2 GiB, contexts: [compute, graphics]}"
    found = published(machine, processes.COLLECTOR, f"{{gpus: 1, timeline: {{0: [{{at: 0, processes: [{both}]}}]}}}}")
    assert found == {
        "rankscope_gpu_processes": [({}, 2)],
        "rankscope_gpu_processes_memory_bytes": [({}, 3 * 2**30)],
    }


def test_the_total_memory_is_absent_if_one_size_is_unknown():
    assert samples(processes.COLLECTOR.families({GPU0: {5: 10, 6: None}})) == {"rankscope_gpu_processes": [({}, 2)]}


def test_single_processes_are_exported_only_on_request(machine):
    assert not process.COLLECTOR.is_on
    assert published(machine, process.COLLECTOR) == {
        "rankscope_gpu_process_memory_bytes": [({"pid": str(os.getpid())}, 2**30)]
    }


def test_throttled_time_is_integrated_by_reason(metered):
    scenario = """
        gpus: 1
        timeline:
          0: [{at: 0, busy: 1}, {at: 10, throttle: [hw_slowdown, sw_thermal_slowdown]}, {at: 20, throttle: []}]"""
    gpu = metered(scenario, ThrottleMeter())
    for _ in range(30):
        seconds = gpu.after(1)
    assert seconds["hw_slowdown"] == seconds["sw_thermal_slowdown"] == 10
    assert seconds["sw_power_cap"] == 0, "a reason starts at 0"


def test_throttled_time_is_the_drivers_counter_if_it_has_one(metered, monkeypatch):
    scenario = "{gpus: 1, timeline: {0: [{at: 2.5, throttle: [hw_thermal_slowdown, sw_power_cap, hw_slowdown]}]}}"
    gpu = metered(scenario, ThrottleMeter())
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.95.05")
    seconds = gpu.after(10, elapsed=1)
    assert seconds["hw_thermal_slowdown"] == seconds["sw_power_cap"] == 7.5, "includes time before the start"
    assert seconds["hw_slowdown"] == 1, "this reason has no counter"


def test_a_field_with_another_meaning_in_this_driver_is_not_read(machine, monkeypatch):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, fields: {269: 5, 270: 5, 271: 5}}]}}")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "575.57.08")
    assert "hw_thermal_slowdown" not in clock_event_seconds(m.device())


def test_a_failing_driver_counter_is_absent_and_not_integrated(metered):
    faults = "{at: 5, throttle: [sw_power_cap], fails: {nvmlDeviceGetFieldValues: NOT_SUPPORTED}}"
    gpu = metered(f"{{gpus: 1, timeline: {{0: [{faults}]}}}}", ThrottleMeter())
    assert gpu.after(0, elapsed=1)["sw_power_cap"] == 0
    assert "sw_power_cap" not in gpu.after(10, elapsed=1)


def test_an_idle_gpu_is_not_throttled(metered):
    gpu = metered("{gpus: 1, timeline: {0: [{at: 0, throttle: [applications_clocks_setting]}]}}", ThrottleMeter())
    seconds = gpu.after(0, elapsed=5)
    assert not {"gpu_idle", "applications_clocks_setting"} & set(seconds)
    assert set(seconds.values()) == {0}


def test_well_known_xids_start_at_0_and_others_appear_with_their_first_event():
    found = samples(XidCollector(lambda: {GPU0: Xids({79: 2, 999: 1}, {79: 1234.5})}).collect())
    values = {int(labels["xid"]): value for labels, value in found["rankscope_gpu_xid_errors_total"]}
    assert values[79] == 2
    assert values[999] == 1
    assert values[13] == 0
    assert set(values) == {*WELL_KNOWN, 999}
    assert found["rankscope_gpu_xid_last_timestamp_seconds"] == [({"xid": "79"}, 1234.5)]
