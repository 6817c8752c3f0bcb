"""PCIe and NVLink: speed and traffic of the links. A GPU without a link has no series for it."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.collectors import nvlink, pcie, pcie_throughput
from rankscope_exporter.simulation.gpu import NVLINK_RATE, PCIE_RATE

PREFIX = "rankscope_gpu_"
HALF_BUSY = "timeline: {0: [{at: 0, busy: 0.5}]}"


def test_the_pcie_link_has_current_and_maximum_values(watch):
    gpu = watch("{gpus: 1, model: A100, timeline: {0: [{at: 0, busy: 1}, {at: 10, busy: 0}]}}", pcie.COLLECTOR)
    busy, idle = gpu.after(5), gpu.after(15)
    assert busy[f"{PREFIX}pcie_link_generation"] == {(): 4}
    assert idle[f"{PREFIX}pcie_link_generation"] == {(): 1}
    assert idle[f"{PREFIX}pcie_link_generation_max"] == {(): 4}
    assert busy[f"{PREFIX}pcie_link_width"] == busy[f"{PREFIX}pcie_link_width_max"] == {(): 16}
    assert busy[f"{PREFIX}pcie_replays_total"] == {(): 0}


def test_pcie_bytes_come_from_the_cumulative_counter(watch):
    gpu = watch(f"{{gpus: 1, {HALF_BUSY}}}", pcie.COLLECTOR)
    assert gpu.after(10)[f"{PREFIX}pcie_bytes_total"] == {
        "transmit": pytest.approx(PCIE_RATE * 5),
        "receive": pytest.approx(PCIE_RATE * 5),
    }


def test_a_possible_32_bit_counter_is_absent_until_it_exceeds_32_bits(watch):
    transmit, receive = pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
    gpu = watch(
        f"""
        gpus: 1
        timeline:
          0: [{{at: 0, fields: {{{transmit}: 4294967295, {receive}: 4294967295}}}},
              {{at: 5, fields: {{{transmit}: 12, {receive}: 4294967300}}}},
              {{at: 9, fields: {{{transmit}: 4294967290, {receive}: 13}}}}]""",
        pcie.COLLECTOR,
    )
    assert f"{PREFIX}pcie_bytes_total" not in gpu.after(1)
    assert gpu.after(5)[f"{PREFIX}pcie_bytes_total"] == {"receive": 4294967300}
    assert gpu.after(4)[f"{PREFIX}pcie_bytes_total"] == {"receive": 13}, "the driver was reloaded"


def test_a_gpu_without_the_counter_has_no_pcie_bytes_and_no_blocking_call(watch, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPcieThroughput", lambda *_arguments: pytest.fail("it blocks 20 ms"))
    assert f"{PREFIX}pcie_bytes_total" not in watch(f"{{gpus: 1, model: T4, {HALF_BUSY}}}", pcie.COLLECTOR).after(10)


def test_pcie_throughput_is_in_bytes_per_second_and_disabled_by_default(watch):
    assert not pcie_throughput.COLLECTOR.is_on
    found = watch(f"{{gpus: 1, model: T4, {HALF_BUSY}}}", pcie_throughput.COLLECTOR).after(10)
    assert found == {f"{PREFIX}pcie_throughput_bytes_per_second": {"transmit": 5e8, "receive": 5e8}}


@pytest.mark.parametrize(("model", "links"), [("H100", 18), ("A100", 12), ("B200", 18)])
def test_nvlink_bytes_are_the_sum_of_all_links_for_any_driver_counter(watch, model, links):
    found = watch(f"{{gpus: 1, model: {model}, {HALF_BUSY}}}", nvlink.COLLECTOR).after(10)
    assert found[f"{PREFIX}nvlink_links"] == found[f"{PREFIX}nvlink_links_active"] == {(): links}
    total = pytest.approx(NVLINK_RATE * 5, rel=1e-6)
    assert found[f"{PREFIX}nvlink_bytes_total"] == {"transmit": total, "receive": total}


@pytest.mark.parametrize(
    ("model", "field", "kind", "count"),
    [
        ("H100", pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "replay", 7),
        ("B200", pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS, "symbol", 7 * 18),
    ],
)
def test_nvlink_errors_are_the_sum_of_all_links_by_kind(watch, model, field, kind, count):
    scenario = f"{{gpus: 1, model: {model}, timeline: {{0: [{{at: 0, fields: {{{field}: 7}}}}]}}}}"
    errors = watch(scenario, nvlink.COLLECTOR).after(1)[f"{PREFIX}nvlink_errors_total"]
    assert errors.pop(kind) == count
    assert set(errors.values()) == {0}


def test_a_link_that_goes_down_is_detected(watch):
    gpu = watch("{gpus: 1, timeline: {0: [{at: 5, nvlinks_down: 2}]}}", nvlink.COLLECTOR)
    assert gpu.after(1)[f"{PREFIX}nvlink_links_active"] == {(): 18}
    assert gpu.after(nvlink.STATES_EVERY)[f"{PREFIX}nvlink_links_active"] == {(): 16}


def test_a_gpu_without_nvlink_has_no_nvlink_metrics(watch):
    assert watch("{gpus: 1, model: T4}", nvlink.COLLECTOR).after(1) == {}
