"""docs/dcgm.md lists the exported metrics, the missing names, and the number of series."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from docs import generate

from rankscope_exporter.dcgm import xid
from rankscope_exporter.dcgm.metrics import METRICS
from rankscope_exporter.dcgm.recent import WINDOW

PAGE = Path("docs/dcgm.md").read_text(encoding="utf-8")
SERVED = {**{metric.name: metric.kind for metric in METRICS}, xid.METRIC.name: "gauge"}

# Names and types of the active lines in etc/default-counters.csv of NVIDIA/dcgm-exporter.
DEFAULT_COUNTERS = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_GPU_TEMP": "gauge",
    "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge",
    "DCGM_FI_DEV_ENC_UTIL": "gauge",
    "DCGM_FI_DEV_DEC_UTIL": "gauge",
    "DCGM_FI_DEV_XID_ERRORS": "gauge",
    "DCGM_FI_DEV_FB_FREE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge",
    "DCGM_FI_DEV_FB_RESERVED": "gauge",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "gauge",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "gauge",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}


def rows(first: str) -> list[list[str]]:
    """Return the cells of the page's table whose header starts with `first`."""
    lines = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in lines]


def test_every_default_counter_is_exported_with_its_type_or_listed_as_missing() -> None:
    missing = {row[0] for row in rows("missing")} & set(DEFAULT_COUNTERS)
    assert missing == {"DCGM_FI_DEV_VGPU_LICENSE_STATUS"}
    assert {name: kind for name, kind in DEFAULT_COUNTERS.items() if name not in missing} == SERVED


def test_the_page_has_the_help_of_every_metric() -> None:
    declared = {(metric.name, metric.kind, metric.help, metric.source) for metric in METRICS}
    assert {tuple(row) for row in rows("name")} == declared | {(xid.METRIC.name, "gauge", xid.METRIC.help, "xid")}
    assert f"{WINDOW:.0f} s" in PAGE


def test_the_page_has_the_number_of_additional_series(sampled: Callable[..., Any]) -> None:
    counted = {}
    for name, model in generate.MODELS.items():
        busy = yaml.safe_dump({"gpus": 1, "model": model, "timeline": {0: [{"at": 0, "busy": 1}]}})
        counted[name] = sum(len(series) for series in sampled(busy).after(3).values())
    assert {row[0]: int(row[1]) for row in rows("one GPU")} == counted
