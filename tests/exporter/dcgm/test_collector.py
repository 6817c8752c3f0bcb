"""What dcgm-exporter's users find: its names, labels and units, with our values, and nothing that nobody knows."""

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
PROFILED = ("GR_ENGINE_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE")  # the rest is told of the whole GPU only


def only(published: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    ((_, value),) = published[f"DCGM_FI_{name}"]
    return value


def said(labels: dict[str, str]) -> dict[str, str]:
    """Without the empty ones, which to Prometheus are absent."""
    return {label: value for label, value in labels.items() if value}


def test_every_value_is_in_dcgms_unit(sampled: Make) -> None:
    watched = sampled(BUSY)
    published = watched.after(20)
    expected = {
        "DEV_SM_CLOCK": 1980,  # MHz
        "DEV_MEM_CLOCK": 2619,
        "DEV_POWER_USAGE": watched.devices[0].power(),  # W
        "DEV_TOTAL_ENERGY_CONSUMPTION": watched.devices[0].energy() * 1000,  # mJ
        "DEV_FB_USED": 20 * 1024,  # MiB
        "DEV_GPU_UTIL": 50,  # %
        "DEV_MEM_COPY_UTIL": 25,
        "DEV_DEC_UTIL": 0,
        "DEV_NVLINK_BANDWIDTH_TOTAL": 1e11 / 1_024_000,  # what DCGM calls MB/s
        "DEV_CORRECTABLE_REMAPPED_ROWS": 3,
        "DEV_UNCORRECTABLE_REMAPPED_ROWS": 1,
        "DEV_ROW_REMAP_FAILURE": 0,
        "PROF_GR_ENGINE_ACTIVE": 0.5,  # ratio
        "PROF_PIPE_TENSOR_ACTIVE": 0.3,
        "PROF_PCIE_TX_BYTES": 1e9,  # bytes/s
    }
    assert {name: only(published, name) for name in expected} == pytest.approx(expected, rel=1e-3)


def test_a_burst_of_a_second_is_in_the_utilization_of_the_next_fifteen(sampled: Make) -> None:
    watched = sampled("{gpus: 1, timeline: {0: [{at: 0}, {at: 8, busy: 1}, {at: 9, busy: 0}]}}")
    watched.after(18)
    for name, whole in (("DEV_GPU_UTIL", 100), ("PROF_GR_ENGINE_ACTIVE", 1)):
        assert only(watched.published(), name) == pytest.approx(whole / 15), name
    assert only(watched.after(10), "DEV_GPU_UTIL") == 0


def test_free_used_and_reserved_memory_are_all_of_it(sampled: Make) -> None:
    published = sampled(BUSY).after(1)
    together = sum(only(published, name) for name in ("DEV_FB_FREE", "DEV_FB_USED", "DEV_FB_RESERVED"))
    assert together == 80 * 1024


def test_a_busy_h100_has_every_metric_once_but_for_the_encoder_that_it_lacks(sampled: Make) -> None:
    published = sampled(BUSY).after(3)
    assert {name: len(rows) for name, rows in published.items()} == {
        **{metric.name: 1 for metric in METRICS if metric.name != "DCGM_FI_DEV_ENC_UTIL"},
        METRIC.name: 1,
    }


def test_a_gpu_is_named_as_dcgm_exporter_names_it(sampled: Make) -> None:
    published = sampled("gpus: 2", gpus=2).after(2)
    assert [said(labels) for labels, _ in published["DCGM_FI_DEV_GPU_TEMP"]] == [
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


def test_a_gpu_without_gpm_has_no_profiling_metrics_and_no_made_up_ones(sampled: Make) -> None:
    published = sampled("{gpus: 1, model: T4, timeline: {0: [{at: 0, busy: 1}]}}").after(5)
    assert not [name for name in published if "_PROF_" in name or "_NVLINK_" in name or "REMAP" in name]
    assert only(published, "DEV_GPU_UTIL") == pytest.approx(100)
    assert "DCGM_FI_DEV_ENC_UTIL" in published


def test_memory_and_profiling_are_told_by_mig_instance_and_the_rest_once(sampled: Make) -> None:
    published = sampled(MIG).after(5)
    for name in ("DEV_FB_USED", "DEV_FB_FREE", *(f"PROF_{name}" for name in PROFILED)):
        instances = [(labels["GPU_I_ID"], labels["GPU_I_PROFILE"]) for labels, _ in published[f"DCGM_FI_{name}"]]
        assert instances == [("1", "3g.40gb"), ("2", "1g.10gb")], name
    free = {labels["GPU_I_ID"]: value for labels, value in published["DCGM_FI_DEV_FB_FREE"]}
    assert free == {"1": 40 * 1024, "2": 10 * 1024}
    assert [labels["GPU_I_ID"] for labels, _ in published["DCGM_FI_DEV_POWER_USAGE"]] == [""]
    assert "DCGM_FI_DEV_GPU_UTIL" not in published, "a GPU that is split tells no utilization"


def held_by(*holders: Holder) -> list[Any]:
    """The collectors, where a scheduler says who holds GPU 0."""
    claims = Claims({"0": holders}, is_complete=True)
    watching = allocation.watching(lambda: claims, ProcessTable(), UserNames())
    return [watching if collector is allocation.COLLECTOR else collector for collector in GPU_COLLECTORS]


def test_the_pod_and_the_job_that_hold_a_gpu_are_on_its_rows(sampled: Make) -> None:
    pod = Holder("kubernetes", k8s_namespace="ml", k8s_pod="train-0", k8s_container="trainer")
    job = Holder("slurm", slurm_job_id="4711")
    published = sampled("gpus: 2", gpus=2, collectors=held_by(pod, job)).after(2)
    wanted = ("hpc_job", "container", "namespace", "pod")
    for name in ("DCGM_FI_DEV_GPU_UTIL", METRIC.name):
        rows = [tuple(labels[label] for label in wanted) for labels, _ in published[name]]
        assert rows == [("4711", "trainer", "ml", "train-0"), ("", "", "", "")], name


def test_who_holds_a_gpu_is_not_said_of_its_instances(sampled: Make) -> None:
    pod = Holder("kubernetes", k8s_namespace="ml", k8s_pod="train-0", k8s_container="trainer")
    published = sampled(MIG, collectors=held_by(pod)).after(2)
    assert [labels["pod"] for labels, _ in published["DCGM_FI_DEV_FB_USED"]] == ["", ""]
    assert [labels["pod"] for labels, _ in published["DCGM_FI_DEV_GPU_TEMP"]] == ["train-0"]


def test_two_pods_that_share_a_gpu_do_not_double_it(sampled: Make) -> None:
    pods = [Holder("kubernetes", k8s_namespace="ml", k8s_pod=f"p{number}", k8s_container="c") for number in (0, 1)]
    ((labels, _),) = sampled("gpus: 1", collectors=held_by(*pods)).after(2)["DCGM_FI_DEV_POWER_USAGE"]
    assert (labels["pod"], labels["namespace"], labels["container"]) == ("p0,p1", "ml", "c")


def test_the_last_xid_is_told_by_value_and_by_label(sampled: Make) -> None:
    watched = sampled("gpus: 2", gpus=2)
    watched.xid_times = {watched.gpus[0]: {79: 30.0, 31: 40.0}}
    rows = watched.after(2)[METRIC.name]
    assert [(labels["err_code"], labels["err_msg"], value) for labels, value in rows] == [
        ("31", "GPU memory page fault", 31),
        ("0", "No Error", 0),
    ]


def test_an_xid_that_nobody_knows_is_told_by_its_code(sampled: Make) -> None:
    watched = sampled("gpus: 1")
    watched.xid_times = {watched.gpus[0]: {999: 1.0}}
    ((labels, value),) = watched.after(2)[METRIC.name]
    assert (labels["err_code"], labels["err_msg"], value) == ("999", "Unknown Error", 999)


def test_every_xid_that_is_counted_from_the_start_has_its_text() -> None:
    assert set(MESSAGES) == {0, *WELL_KNOWN}


def test_of_a_lost_gpu_only_its_last_xid_stays(sampled: Make) -> None:
    watched = sampled("gpus: 2", gpus=2)
    watched.after(3)
    watched.lost = {0}
    watched.xid_times = {watched.gpus[0]: {79: 1.0}}
    published = watched.after(1)
    assert [(labels["gpu"], value) for labels, value in published.pop(METRIC.name)] == [("0", 79), ("1", 0)]
    assert {labels["gpu"] for rows in published.values() for labels, _ in rows} == {"1"}


def test_a_gpu_that_was_never_seen_to_answer_has_no_rows(sampled: Make) -> None:
    watched = sampled("gpus: 1")
    watched.lost = {0}
    assert watched.after(1) == {}


def test_without_a_collector_its_metrics_are_absent_and_the_others_stay(sampled: Make) -> None:
    published = sampled(
        BUSY, collectors=[collector for collector in GPU_COLLECTORS if collector is not power.COLLECTOR]
    ).after(3)
    missing = {metric.name for metric in METRICS if metric.source == "power"}
    assert missing == {"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"}
    assert not missing & set(published)
    assert "DCGM_FI_DEV_GPU_TEMP" in published


def test_what_is_read_is_the_same_with_and_without_it(sampled: Make) -> None:
    """Averaging is on the side: the sources' own metrics come out of the same readings."""
    watched = sampled(BUSY)
    watched.after(3)
    collector = next(collector for collector in watched._readings if collector.name == "load")
    family = next(iter(collector.families(watched.readings(collector))))
    assert family.name == "rankscope_gpu_busy_seconds"
    assert family.samples[0].value > 0
