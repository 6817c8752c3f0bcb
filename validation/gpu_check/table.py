"""Which element of `nvidia-smi -q -x` each metric is held against: a row a metric and label value.

`|` parts the names that an element had in different drivers, `+` elements that are to be added. Names after real
documents of drivers 515 (T4), 535 (A100), 575 (RTX 4070) and 580 (H100).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from validation.gpu_check.smi import look_up, quantity, text

MEBIBYTE = 2.0**20


@dataclass(frozen=True)
class Row:
    """A number. `slack`, in the metric's unit, is for what moves between our reading and nvidia-smi's."""

    metric: str
    """Without `rankscope_gpu_`."""
    path: str
    labels: Mapping[str, str] = field(default_factory=dict)
    slack: float = 0.0


@dataclass(frozen=True)
class Word:
    """A label of an info metric, beside an element of the GPU, or with `../` of the document."""

    metric: str
    label: str
    path: str


def _rows(metric: str, label: str, paths: Mapping[str, str], slack: float = 0.0) -> tuple[Row, ...]:
    return tuple(Row(metric, path, {label: value}, slack) for value, path in paths.items())


def _ecc(metric: str, span: str) -> tuple[Row, ...]:
    at = f"ecc_errors/{span}"
    paths = {
        ("corrected", "sram"): f"{at}/sram_correctable",
        ("corrected", "dram"): f"{at}/dram_correctable",
        ("uncorrected", "dram"): f"{at}/dram_uncorrectable",
        (
            "uncorrected",
            "sram",
        ): f"{at}/sram_uncorrectable_parity+{at}/sram_uncorrectable_secded|{at}/sram_uncorrectable",
    }
    return tuple(Row(metric, path, {"kind": kind, "location": place}) for (kind, place), path in paths.items())


def _power(name: str, old: str) -> str:
    return f"gpu_power_readings/{name}|power_readings/{old}"


_CLOCKS = {"graphics": "graphics_clock", "sm": "sm_clock", "memory": "mem_clock", "video": "video_clock"}
_REASONS = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake",
}
_THRESHOLDS = {"shutdown": "max", "slowdown": "slow", "gpu_max": "max_gpu", "memory_max": "max_mem"}
_COUNTERS = "clocks_event_reasons_counters"
_HISTOGRAM = "remapped_rows/row_remapper_histogram/row_remapper_histogram"
_LINK = "pci/pci_gpu_link_info"

ROWS: tuple[Row, ...] = (
    Row("memory_total_bytes", "fb_memory_usage/total"),
    Row("memory_used_bytes", "fb_memory_usage/used", slack=MEBIBYTE),
    Row("memory_reserved_bytes", "fb_memory_usage/reserved", slack=MEBIBYTE),
    Row("memory_free_bytes", "fb_memory_usage/free", slack=MEBIBYTE),
    Row("bar1_memory_total_bytes", "bar1_memory_usage/total"),
    Row("bar1_memory_used_bytes", "bar1_memory_usage/used", slack=MEBIBYTE),
    # Over a second either side moves; under full load by some percent of 700 W.
    Row(
        "power_watts",
        "gpu_power_readings/average_power_draw|gpu_power_readings/power_draw|power_readings/power_draw",
        slack=20,
    ),
    Row("power_limit_watts", _power("current_power_limit", "enforced_power_limit")),
    Row("power_limit_default_watts", _power("default_power_limit", "default_power_limit")),
    Row("power_limit_min_watts", _power("min_power_limit", "min_power_limit")),
    Row("power_limit_max_watts", _power("max_power_limit", "max_power_limit")),
    Row("temperature_celsius", "temperature/gpu_temp", slack=2),
    Row("memory_temperature_celsius", "temperature/memory_temp", slack=2),
    Row("temperature_margin_celsius", "temperature/gpu_temp_tlimit", slack=2),
    *_rows(
        "temperature_threshold_celsius",
        "threshold",
        {name: f"temperature/gpu_temp_{path}_threshold" for name, path in _THRESHOLDS.items()},
    ),
    *_rows(
        "temperature_margin_threshold_celsius",
        "threshold",
        {name: f"temperature/gpu_temp_{path}_tlimit_threshold" for name, path in _THRESHOLDS.items()},
    ),
    *_rows("clock_hertz", "domain", {name: f"clocks/{path}" for name, path in _CLOCKS.items()}, slack=150e6),
    *_rows("clock_max_hertz", "domain", {name: f"max_clocks/{path}" for name, path in _CLOCKS.items()}),
    Row("performance_state", "performance_state"),
    *_rows(
        "throttled_seconds_total",
        "reason",
        {name: f"{_COUNTERS}/{_COUNTERS}_{path}" for name, path in _REASONS.items()},
        slack=0.01,
    ),
    *_ecc("ecc_errors_total", "volatile"),
    *_ecc("ecc_lifetime_errors_total", "aggregate"),
    *_rows(
        "remapped_rows_total",
        "kind",
        {"corrected": "remapped_rows/remapped_row_corr", "uncorrected": "remapped_rows/remapped_row_unc"},
    ),
    Row("row_remapping_pending", "remapped_rows/remapped_row_pending"),
    Row("row_remapping_failed", "remapped_rows/remapped_row_failure"),
    *_rows(
        "row_remapping_banks",
        "spare_rows",
        {name: f"{_HISTOGRAM}_{name}" for name in ("max", "high", "partial", "low", "none")},
    ),
    *_rows(
        "retired_pages_total",
        "cause",
        {
            "single_bit": "retired_pages/multiple_single_bit_retirement/retired_count",
            "double_bit": "retired_pages/double_bit_retirement/retired_count",
        },
    ),
    Row("page_retirement_pending", "retired_pages/pending_retirement|retired_pages/pending_blacklist"),
    Row("pcie_link_generation", f"{_LINK}/pcie_gen/current_link_gen"),
    Row("pcie_link_generation_max", f"{_LINK}/pcie_gen/max_link_gen"),
    Row("pcie_link_width", f"{_LINK}/link_widths/current_link_width"),
    Row("pcie_link_width_max", f"{_LINK}/link_widths/max_link_width"),
    Row("pcie_replays_total", "pci/replay_counter"),
)

WORDS: tuple[Word, ...] = (
    Word("info", "name", "product_name"),
    Word("info", "pci_bus_id", "pci/pci_bus_id"),
    Word("info", "driver_version", "../driver_version"),
    Word("info", "cuda_version", "../cuda_version"),
    Word("modes_info", "persistence", "persistence_mode"),
    Word("modes_info", "compute", "compute_mode"),
    Word("modes_info", "virtualization", "gpu_virtualization_mode/virtualization_mode"),
    Word("modes_info", "mig", "mig_mode/current_mig"),
    Word("modes_info", "ecc", "ecc_mode/current_ecc"),
    Word("recovery_action_info", "action", "gpu_recovery_action"),
    Word("fabric_info", "state", "fabric/state"),
    Word("fabric_info", "status", "fabric/status"),
    Word("fabric_info", "cluster_uuid", "fabric/clusterUuid"),
    Word("fabric_info", "clique", "fabric/cliqueId"),
)
# Where nvidia-smi's word, in lower case and with underscores, is not ours.
ALIASES = {
    "pass_through": "passthrough",
    "reset": "gpu_reset",
    "gpu_reset_required": "gpu_reset",
    "reboot": "node_reboot",
}

Expected = tuple[str, Mapping[str, str], tuple[float, float] | None, float]
"""Metric, labels, nvidia-smi's number with its exactness, and slack."""


def expectations(gpu: ElementTree.Element) -> Iterator[Expected]:
    """Every number that nvidia-smi shows of a GPU, or does not."""
    for row in ROWS:
        yield row.metric, row.labels, look_up(gpu, row.path), row.slack
    yield from _processes(gpu)
    yield from _mig(gpu)


DERIVED = ("processes", "processes_memory_bytes", "process_memory_bytes")
DERIVED_MIG = ("mig_instances", "mig_info", "mig_memory_total_bytes", "mig_memory_used_bytes")


def _processes(gpu: ElementTree.Element) -> Iterator[Expected]:
    """Both count a process once; nvidia-smi shows one with several contexts in several lines."""
    memory = {p.findtext("pid", ""): quantity(text(p, "used_memory")) for p in gpu.iterfind("processes/process_info")}
    known = [size for size in memory.values() if size]
    exact = sum(step for _, step in known)
    yield "processes", {}, (float(len(memory)), 0.0), 0.0
    total = (sum(value for value, _ in known), exact) if len(known) == len(memory) else None
    yield "processes_memory_bytes", {}, total, MEBIBYTE
    for pid, size in memory.items():
        yield "process_memory_bytes", {"pid": pid}, size, MEBIBYTE


def _mig(gpu: ElementTree.Element) -> Iterator[Expected]:
    devices = gpu.findall("mig_devices/mig_device")
    is_on = text(gpu, "mig_mode/current_mig") == "Enabled"
    yield "mig_instances", {}, (float(len(devices)), 0.0) if is_on else None, 0.0
    for device in devices:
        instance = {"gpu_instance": device.findtext("gpu_instance_id", "")}
        compute = {"compute_instance": device.findtext("compute_instance_id", "")}
        yield "mig_info", {**instance, **compute}, (1.0, 0.0), 0.0
        for name in ("total", "used"):
            yield f"mig_memory_{name}_bytes", instance, look_up(device, f"fb_memory_usage/{name}"), MEBIBYTE


def word(log: ElementTree.Element, gpu: ElementTree.Element, path: str) -> str | None:
    """nvidia-smi's word; None where it has none."""
    return text(log, path.removeprefix("../")) if path.startswith("../") else text(gpu, path)


def spelled(found: str) -> str:
    """As our labels of states are spelled."""
    plain = found.lower().replace(" ", "_").replace("-", "_")
    return ALIASES.get(plain, plain)


TABLED: frozenset[str] = frozenset(
    {f"rankscope_gpu_{name}" for name in DERIVED + DERIVED_MIG}
    | {f"rankscope_gpu_{row.metric}" for row in ROWS}
    | {f"rankscope_gpu_{row.metric}" for row in WORDS}
)
