"""The driver's values become base units, and unsupported values become None."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.nvml.device import Memory
from rankscope_exporter.gpu.nvml.errors import DeviceLostError, DriverError, ask
from rankscope_exporter.simulation import simulated_uuid

GIB = 2**30
QUANTITIES = {
    "name": "nvmlDeviceGetName",
    "pci_bus_id": "nvmlDeviceGetPciInfo_v3",
    "minor_number": "nvmlDeviceGetMinorNumber",
    "utilization": "nvmlDeviceGetUtilizationRates",
    "power": "nvmlDeviceGetPowerUsage",
    "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
    "energy": "nvmlDeviceGetTotalEnergyConsumption",
    "temperature": "nvmlDeviceGetTemperature",
}


def test_every_quantity_is_in_base_units(machine):
    m = machine("""
        gpus: 2
        timeline: {1: [{at: 0, busy: 0.5, memory_used: 20 GiB, temperature: 61, processes: [{pid: 7}]}]}""")
    device = m.device(1)
    m.clock.advance(10)

    assert device.uuid == simulated_uuid(1)
    assert device.index == 1
    assert device.name() == "Simulated NVIDIA H100 80GB HBM3"
    assert device.pci_bus_id() == "00000000:11:00.0"
    assert device.minor_number() == 1
    assert device.utilization() == 0.5
    assert device.memory() == Memory(80 * GIB, used=20 * GIB, free=60 * GIB - 640 * 2**20, reserved=640 * 2**20)
    assert device.power() == pytest.approx(70 + 630 * 0.9 * 0.5)
    assert device.power_limit() == 700
    assert device.energy() == pytest.approx(10 * (70 + 630 * 0.9 * 0.5))
    assert device.temperature() == 61
    assert device.clock("sm") == device.clock_max("sm") == 1.98e9
    assert device.clock("memory") == device.clock_max("memory") == 2.619e9
    assert device.clock_event_reasons() == frozenset()
    assert device.pids() == {7}
    assert device.driver_version() == "simulated"
    assert device.cuda_version() == "13.0"


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_unsupported_values_are_none(machine, quantity, code):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{QUANTITIES[quantity]}: {code}}}}}]}}}}")
    assert getattr(m.device(), quantity)() is None


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_lost_device_raises_device_lost(machine, quantity):
    m = machine("{gpus: 1, timeline: {0: [{at: 5, lost: true}]}}")
    device = m.device()
    m.clock.advance(5)
    with pytest.raises(DeviceLostError, match="GPU is lost"):
        getattr(device, quantity)()


@pytest.mark.parametrize("code", ["UNKNOWN", "TIMEOUT", "IRQ_ISSUE", "1234"])
def test_any_failure_is_an_error_even_with_an_unknown_code(machine, code):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{nvmlDeviceGetPowerUsage: {code}}}}}]}}}}")
    with pytest.raises(DriverError, match="nvmlDeviceGetPowerUsage") as caught:
        m.device().power()
    assert not isinstance(caught.value, DeviceLostError)


def test_a_driver_without_memory_v2_does_not_report_reserved_memory(machine):
    m = machine("""
        gpus: 1
        timeline: {0: [{at: 0, memory_used: 20 GiB, fails: {nvmlDeviceGetMemoryInfo_v2: FUNCTION_NOT_FOUND}}]}""")
    memory = m.device().memory()
    assert memory == Memory(80 * GIB, used=20 * GIB + 640 * 2**20, free=60 * GIB - 640 * 2**20)


def test_a_driver_that_supports_only_throttle_reasons_is_queried_by_that_name(machine):
    m = machine("""
        gpus: 1
        timeline:
          0: [{at: 0, busy: 1, throttle: [hw_slowdown, sw_power_cap],
               fails: {nvmlDeviceGetCurrentClocksEventReasons: FUNCTION_NOT_FOUND}}]""")
    device = m.device()
    m.clock.advance(1)
    assert device.clock_event_reasons() == {"hw_slowdown", "sw_power_cap"}


def test_an_unknown_throttle_reason_is_called_other(machine, monkeypatch):
    device = machine("gpus: 1").device()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda _handle: 1 << 40 | 0x4)
    assert device.clock_event_reasons() == {"other", "sw_power_cap"}


def test_a_process_with_both_kinds_of_context_counts_once(machine):
    m = machine("""
        gpus: 1
        timeline:
          0: [{at: 0, processes: [{pid: 1, contexts: [compute, graphics]}, {pid: 2},
                                  {pid: 3, contexts: [graphics]}]}]""")
    assert m.device().pids() == {1, 2, 3}


def test_graphics_processes_are_reported_if_compute_processes_are_not(machine):
    m = machine("""
        gpus: 1
        timeline: {0: [{at: 0, processes: [{pid: 3, contexts: [graphics]}],
                        fails: {nvmlDeviceGetComputeRunningProcesses_v3: NOT_SUPPORTED}}]}""")
    assert m.device().pids() == {3}


def test_all_samples_of_the_ring_are_returned_newest_first(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0.5, busy: 1}]}}")
    device = m.device()
    m.clock.advance(1)
    samples = list(device.utilization_samples())
    assert [sample.percent for sample in samples] == [100, 100, 100, 0, 0, 0]
    assert samples[0].timestamp_us == pytest.approx(m.clock() * 1e6, abs=1)


def test_a_device_without_a_ring_has_no_samples(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetSamples: NOT_SUPPORTED}}]}}")
    device = m.device()
    assert device.utilization_samples() is None
    assert not device.samples_utilization()


def test_unavailable_and_unused_samples_are_omitted(machine, monkeypatch):
    device = machine("gpus: 1").device()
    samples = (pynvml.c_nvmlSample_t * 3)()
    samples[0].timeStamp, samples[0].sampleValue.uiVal = 1, 0xFFFFFFFF
    samples[1].timeStamp, samples[1].sampleValue.uiVal = 2, 50
    answer = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples[:]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSamples", lambda *_arguments: answer)
    assert [sample.timestamp_us for sample in device.utilization_samples()] == [2]


def ring_of(monkeypatch: pytest.MonkeyPatch, stamps: list[int]) -> None:
    """Let the driver answer with samples of these stamps, in this order."""
    samples = (pynvml.c_nvmlSample_t * len(stamps))()
    for sample, stamp in zip(samples, stamps, strict=True):
        sample.timeStamp, sample.sampleValue.uiVal = stamp, 50
    answer = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples[:]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSamples", lambda *_arguments: answer)


@pytest.mark.parametrize("missing", [[], [8]])
@pytest.mark.parametrize("oldest", range(10))
def test_a_ring_that_the_driver_returns_as_it_lies_in_memory_is_put_in_order(machine, monkeypatch, oldest, missing):
    device = machine("gpus: 1").device()
    stamps = [10_000_000 + 166_667 * number for number in range(10) if number not in missing]
    ring_of(monkeypatch, stamps[oldest:] + stamps[:oldest])
    assert [sample.timestamp_us for sample in device.utilization_samples()] == stamps[::-1]


@pytest.mark.parametrize("steps", [{5: -3_600_000_000}, {3: -60_000_000, 7: -60_000_000}, {5: -600_000}])
def test_a_ring_whose_clock_was_set_back_is_in_order(machine, monkeypatch, steps):
    device = machine("gpus: 1").device()
    stamps = [9_000_000_000]
    for number in range(1, 10):
        stamps.append(stamps[-1] + steps.get(number, 0) + 166_667)
    ring_of(monkeypatch, stamps)
    assert [sample.timestamp_us for sample in device.utilization_samples()] == stamps[::-1]


def test_a_ring_that_is_not_full_is_in_order(machine, monkeypatch):
    device = machine("gpus: 1").device()
    ring_of(monkeypatch, [1_000_000, 1_200_000, 1_400_000, 0, 0])
    assert [sample.timestamp_us for sample in device.utilization_samples()] == [1_400_000, 1_200_000, 1_000_000]


def test_samples_of_an_unknown_type_are_omitted(machine, monkeypatch):
    device = machine("gpus: 1").device()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetSamples", lambda *_arguments: (99, [pynvml.c_nvmlSample_t()]))
    assert list(device.utilization_samples()) == []


def test_bindings_that_mismatch_the_library_count_as_unsupported():
    def mismatched() -> None:
        raise pynvml.NVMLLibraryMismatchError

    assert ask(mismatched) is None
