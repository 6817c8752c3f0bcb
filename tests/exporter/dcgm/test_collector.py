"""dcgm-exporter's names, labels and units with our values, and nothing that is unknown."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from rankscope_exporter.dcgm.metrics import METRICS
from rankscope_exporter.dcgm.xid import MESSAGES, METRIC
from rankscope_exporter.gpu.allocation.claims import Claims
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames
from rankscope_exporter.gpu.collectors import allocation, power
from rankscope_exporter.gpu.collectors.xid import WELL_KNOWN
from rankscope_exporter.registry import GPU_COLLECTORS
from rankscope_exporter.simulation import simulated_uuid

Make = Callable[..., Any]

BUSY = """
gpus: 1
timeline:
  0:
    - {at: 0, busy: 0.5, memory_used: 20 GiB, fields: {142: 3, 143: 1}}
"""
MIG = """
gpus: 1
model: {like: H100, mig: [3g.40gb, 1g.10gb]}
timeline:
  0: [{at: 0, busy: 0.5}]
"""
PROFILED = ("GR_ENGINE_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE")  # the others exist only for the whole GPU


def only(published: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    ((_, value),) = published[f"DCGM_FI_{name}"]
    return value


def nonempty(labels: dict[str, str]) -> dict[str, str]:
    """Return the labels without empty ones, which Prometheus treats as absent."""
    return {label: value for label, value in labels.items() if value}


def test_every_value_is_in_dcgms_unit(sampled: Make) -> None:
    node = sampled(BUSY)
    published = node.after(20)
    expected = {
        "DEV_SM_CLOCK": 1980,  # MHz
        "DEV_MEM_CLOCK": 2619,
        "DEV_POWER_USAGE": node.devices[0].power(),  # W
        "DEV_TOTAL_ENERGY_CONSUMPTION": node.devices[0].energy() * 1000,  # mJ
        "DEV_FB_USED": 20 * 1024,  # MiB
        "DEV_GPU_UTIL": 50,  # %
        "DEV_MEM_COPY_UTIL": 25,
        "DEV_DEC_UTIL": 0,
        "DEV_NVLINK_BANDWIDTH_TOTAL": 1e11 / 1_024_000,  # DCGM's MB/s
        "DEV_CORRECTABLE_REMAPPED_ROWS": 3,
        "DEV_UNCORRECTABLE_REMAPPED_ROWS": 1,
        "DEV_ROW_REMAP_FAILURE": 0,
        "PROF_GR_ENGINE_ACTIVE": 0.5,  # ratio
        "PROF_PIPE_TENSOR_ACTIVE": 0.3,
        "PROF_PCIE_TX_BYTES": 1e9,  # bytes/s
    }
    assert {name: only(published, name) for name in expected} == pytest.approx(expected, rel=1e-3)


def test_a_burst_of_a_second_is_averaged_over_the_next_fifteen(sampled: Make) -> None:
    node = sampled("{gpus: 1, timeline: {0: [{at: 0}, {at: 8, busy: 1}, {at: 9, busy: 0}]}}")
    node.after(18)
    for name, whole in (("DEV_GPU_UTIL", 100), ("PROF_GR_ENGINE_ACTIVE", 1)):
        assert only(node.published(), name) == pytest.approx(whole / 15), name
    assert only(node.after(10), "DEV_GPU_UTIL") == 0


def test_free_used_and_reserved_memory_add_up_to_the_total(sampled: Make) -> None:
    published = sampled(BUSY).after(1)
    total = sum(only(published, name) for name in ("DEV_FB_FREE", "DEV_FB_USED", "DEV_FB_RESERVED"))
    assert total == 80 * 1024


def test_a_busy_h100_has_every_metric_once_except_the_missing_encoder(sampled: Make) -> None:
    published = sampled(BUSY).after(3)
    assert {name: len(rows) for name, rows in published.items()} == {
        **{metric.name: 1 for metric in METRICS if metric.name != "DCGM_FI_DEV_ENC_UTIL"},
        METRIC.name: 1,
    }


def test_a_gpu_has_dcgm_exporters_labels(sampled: Make) -> None:
    published = sampled("gpus: 2", gpus=2).after(2)
    assert [nonempty(labels) for labels, _ in published["DCGM_FI_DEV_GPU_TEMP"]] == [
        {
            "gpu": str(index),
            "UUID": simulated_uuid(index),
            "pci_bus_id": f"00000000:1{index}:00.0",
            "device": f"nvidia{index}",
            "modelName": "Simulated NVIDIA H100 80GB HBM3",
            "Hostname": socket.gethostname(),
            "DCGM_FI_DRIVER_VERSION": "simulated",
        }
        for index in range(2)
    ]


def test_a_gpu_without_gpm_has_no_profiling_metrics(sampled: Make) -> None:
    published = sampled("{gpus: 1, model: T4, timeline: {0: [{at: 0, busy: 1}]}}").after(5)
    assert not [name for name in published if "_PROF_" in name or "_NVLINK_" in name or "REMAP" in name]
    assert only(published, "DEV_GPU_UTIL") == pytest.approx(100)
    assert "DCGM_FI_DEV_ENC_UTIL" in published


def test_memory_and_profiling_are_by_mig_instance_and_the_rest_is_not(sampled: Make) -> None:
    published = sampled(MIG).after(5)
    for name in ("DEV_FB_USED", "DEV_FB_FREE", *(f"PROF_{name}" for name in PROFILED)):
        instances = [(labels["GPU_I_ID"], labels["GPU_I_PROFILE"]) for labels, _ in published[f"DCGM_FI_{name}"]]
        assert instances == [("1", "3g.40gb"), ("2", "1g.10gb")], name
    free = {labels["GPU_I_ID"]: value for labels, value in published["DCGM_FI_DEV_FB_FREE"]}
    assert free == {"1": 40 * 1024, "2": 10 * 1024}
    assert [labels["GPU_I_ID"] for labels, _ in published["DCGM_FI_DEV_POWER_USAGE"]] == [""]
    assert "DCGM_FI_DEV_GPU_UTIL" not in published, "a split GPU reports no utilization"


def held_by(*holders: Holder) -> list[Any]:
    """Return the collectors, with a scheduler that reports these holders of GPU 0."""
    claims = Claims({"0": holders}, is_complete=True)
    with_claims = allocation.watching(lambda: claims, ProcessTable(), UserNames())
    return [with_claims if collector is allocation.COLLECTOR else collector for collector in GPU_COLLECTORS]


def test_a_gpus_pod_and_job_are_labels(sampled: Make) -> None:
    pod = Holder("kubernetes", k8s_namespace="ml", k8s_pod="train-0", k8s_container="trainer")
    job = Holder("slurm", slurm_job_id="4711")
    published = sampled("gpus: 2", gpus=2, collectors=held_by(pod, job)).after(2)
    expected = ("hpc_job", "container", "namespace", "pod")
    for name in ("DCGM_FI_DEV_GPU_UTIL", METRIC.name):
        rows = [tuple(labels[label] for label in expected) for labels, _ in published[name]]
        assert rows == [("4711", "trainer", "ml", "train-0"), ("", "", "", "")], name


def test_holders_are_labels_of_the_gpu_but_not_of_its_instances(sampled: Make) -> None:
    pod = Holder("kubernetes", k8s_namespace="ml", k8s_pod="train-0", k8s_container="trainer")
    published = sampled(MIG, collectors=held_by(pod)).after(2)
    assert [labels["pod"] for labels, _ in published["DCGM_FI_DEV_FB_USED"]] == ["", ""]
    assert [labels["pod"] for labels, _ in published["DCGM_FI_DEV_GPU_TEMP"]] == ["train-0"]


def test_two_pods_that_share_a_gpu_have_one_row(sampled: Make) -> None:
    pods = [Holder("kubernetes", k8s_namespace="ml", k8s_pod=f"p{number}", k8s_container="c") for number in (0, 1)]
    ((labels, _),) = sampled("gpus: 1", collectors=held_by(*pods)).after(2)["DCGM_FI_DEV_POWER_USAGE"]
    assert (labels["pod"], labels["namespace"], labels["container"]) == ("p0,p1", "ml", "c")


def test_the_last_xid_is_a_value_and_a_label(sampled: Make) -> None:
    node = sampled("gpus: 2", gpus=2)
    node.xid_times = {node.gpus[0]: {79: 30.0, 31: 40.0}}
    rows = node.after(2)[METRIC.name]
    assert [(labels["err_code"], labels["err_msg"], value) for labels, value in rows] == [
        ("31", "GPU memory page fault", 31),
        ("0", "No Error", 0),
    ]


def test_an_unknown_xid_has_its_code(sampled: Make) -> None:
    node = sampled("gpus: 1")
    node.xid_times = {node.gpus[0]: {999: 1.0}}
    ((labels, value),) = node.after(2)[METRIC.name]
    assert (labels["err_code"], labels["err_msg"], value) == ("999", "Unknown Error", 999)


def test_every_well_known_xid_has_a_message() -> None:
    assert set(MESSAGES) == {0, *WELL_KNOWN}


def test_a_lost_gpu_keeps_only_its_last_xid(sampled: Make) -> None:
    node = sampled("gpus: 2", gpus=2)
    node.after(3)
    node.lost = {0}
    node.xid_times = {node.gpus[0]: {79: 1.0}}
    published = node.after(1)
    assert [(labels["gpu"], value) for labels, value in published.pop(METRIC.name)] == [("0", 79), ("1", 0)]
    assert {labels["gpu"] for rows in published.values() for labels, _ in rows} == {"1"}


def test_a_gpu_that_never_answered_has_no_rows(sampled: Make) -> None:
    node = sampled("gpus: 1")
    node.lost = {0}
    assert node.after(1) == {}


def test_metrics_of_a_disabled_collector_are_absent_and_the_others_remain(sampled: Make) -> None:
    published = sampled(
        BUSY, collectors=[collector for collector in GPU_COLLECTORS if collector is not power.COLLECTOR]
    ).after(3)
    missing = {metric.name for metric in METRICS if metric.source == "power"}
    assert missing == {"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"}
    assert not missing & set(published)
    assert "DCGM_FI_DEV_GPU_TEMP" in published


def test_averaging_does_not_change_the_collectors_own_metrics(sampled: Make) -> None:
    """Both come from the same readings."""
    node = sampled(BUSY)
    node.after(3)
    collector = next(collector for collector in node._readings if collector.name == "load")
    family = next(iter(collector.families(node.values(collector))))
    assert family.name == "rankscope_gpu_busy_seconds"
    assert family.samples[0].value > 0
