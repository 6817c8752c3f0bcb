"""Compare each metric with its element of `nvidia-smi -q -x`, between scrapes taken around it.

A new GPU metric needs a line in ROWS or INVARIANT (if nvidia-smi does not show it as a number), or an effect in
load.py; a test fails if it has none.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from validation.gpu_check.exporter import Scrape, Series, values
from validation.gpu_check.report import Check, judge, ok_if, show

AROUND = 1.6  # seconds before and after; a scrape serves values that are up to a second old
MIB = 2.0**20
UNITS = {"": 1.0, "MiB": MIB, "W": 1.0, "C": 1.0, "MHz": 1e6, "us": 1e-6, "x": 1.0, "bank(s)": 1.0}
NUMBER = re.compile(r"P?(-?\d+(?:\.\d+)?) ?([^\d\s]*)")


@dataclass(frozen=True)
class Row:
    """A number: the metric without `rankscope_gpu_`, and the tolerance in its unit.

    In the path, `|` separates the names of an element in different drivers, `+` elements to add, and `count:` and
    `sum:` mean all elements of that name. `{}` is each of `names`, nvidia-smi's names for these label values.
    """

    metric: str
    path: str
    tolerance: float = 0.0
    names: Mapping[str, str] = field(default_factory=lambda: {"": ""})


CLOCKS = {"graphics": "graphics", "sm": "sm", "memory": "mem", "video": "video"}
THRESHOLDS = {"shutdown": "max", "slowdown": "slow", "gpu_max": "max_gpu", "memory_max": "max_mem"}
THROTTLED = "clocks_event_reasons_counters/clocks_event_reasons_counters_{}"
REASONS = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake",
}
ECC = {
    "corrected sram": "sram_correctable",
    "corrected dram": "dram_correctable",
    "uncorrected sram": "sram_uncorrectable_parity+sram_uncorrectable_secded",
    "uncorrected dram": "dram_uncorrectable",
}
SPARE_ROWS = {name: name for name in ("max", "high", "partial", "low", "none")}
RETIRED = {"single_bit": "multiple_single_bit", "double_bit": "double_bit"}
POWER = "gpu_power_readings/average_power_draw|gpu_power_readings/power_draw|power_readings/power_draw"
LINK = "pci/pci_gpu_link_info"

ROWS: tuple[Row, ...] = (
    Row("memory_total_bytes", "fb_memory_usage/total", MIB),
    Row("memory_used_bytes", "fb_memory_usage/used", 2 * MIB),
    Row("memory_reserved_bytes", "fb_memory_usage/reserved", 2 * MIB),
    Row("memory_free_bytes", "fb_memory_usage/free", 2 * MIB),
    Row("bar1_memory_total_bytes", "bar1_memory_usage/total", MIB),
    Row("bar1_memory_used_bytes", "bar1_memory_usage/used", 2 * MIB),
    Row("power_watts", POWER, 20),
    Row("power_limit_watts", "gpu_power_readings/current_power_limit|power_readings/enforced_power_limit", 0.01),
    Row("power_limit_default_watts", "gpu_power_readings/default_power_limit|power_readings/default_power_limit", 0.01),
    Row("power_limit_min_watts", "gpu_power_readings/min_power_limit|power_readings/min_power_limit", 0.01),
    Row("power_limit_max_watts", "gpu_power_readings/max_power_limit|power_readings/max_power_limit", 0.01),
    Row("temperature_celsius", "temperature/gpu_temp", 2),
    Row("memory_temperature_celsius", "temperature/memory_temp", 2),
    Row("temperature_margin_celsius", "temperature/gpu_temp_tlimit", 2),
    Row("temperature_threshold_celsius", "temperature/gpu_temp_{}_threshold", 0, THRESHOLDS),
    Row("temperature_margin_threshold_celsius", "temperature/gpu_temp_{}_tlimit_threshold", 0, THRESHOLDS),
    Row("clock_hertz", "clocks/{}_clock", 150e6, CLOCKS),
    Row("clock_max_hertz", "max_clocks/{}_clock", 0, CLOCKS),
    Row("performance_state", "performance_state"),
    Row("throttled_seconds_total", THROTTLED, 0.01, REASONS),
    Row("ecc_errors_total", "ecc_errors/volatile/{}", 0, ECC),
    Row("ecc_lifetime_errors_total", "ecc_errors/aggregate/{}", 0, ECC),
    Row("remapped_rows_total", "remapped_rows/remapped_row_{}", 0, {"corrected": "corr", "uncorrected": "unc"}),
    Row("row_remapping_pending", "remapped_rows/remapped_row_pending"),
    Row("row_remapping_failed", "remapped_rows/remapped_row_failure"),
    Row("row_remapping_banks", "remapped_rows/row_remapper_histogram/row_remapper_histogram_{}", 0, SPARE_ROWS),
    Row("retired_pages_total", "retired_pages/{}_retirement/retired_count", 0, RETIRED),
    Row("page_retirement_pending", "retired_pages/pending_retirement|retired_pages/pending_blacklist"),
    Row("pcie_link_generation", f"{LINK}/pcie_gen/current_link_gen"),
    Row("pcie_link_generation_max", f"{LINK}/pcie_gen/max_link_gen"),
    Row("pcie_link_width", f"{LINK}/link_widths/current_link_width"),
    Row("pcie_link_width_max", f"{LINK}/link_widths/max_link_width"),
    Row("pcie_replays_total", "pci/replay_counter"),
    Row("processes", "count:processes/process_info"),
    Row("processes_memory_bytes", "sum:processes/process_info/used_memory", 2 * MIB),
    Row("process_memory_bytes", "sum:processes/process_info/used_memory", 2 * MIB),
)

HOLDS: Mapping[str, Callable[[Sequence[float]], bool]] = {
    "is 1": lambda seen: set(seen) == {1.0},
    "is 0": lambda seen: set(seen) == {0.0},
    "is constant": lambda seen: len(set(seen)) == 1,
    "does not decrease": lambda seen: all(before <= after for before, after in itertools.pairwise(seen)),
    "is below 0.5": lambda seen: max(seen) < 0.5,
}
# The condition for each series of the metrics without a reference value.
INVARIANT: Mapping[str, Sequence[str]] = {
    "is 1": (
        *("gpu_up", "gpu_allocation_info", "gpu_state_info", "gpu_mig_info", "exporter_build_info"),
        *("gpu_info", "gpu_modes_info", "gpu_recovery_action_info", "gpu_fabric_info"),
        *("exporter_nvml_up", "exporter_collector_success", "exporter_run_not_judged_info"),
    ),
    "is 0": (
        *("exporter_gpus_released", "exporter_rank_files_skipped", "exporter_rank_gpus_contradicted"),
        *("exporter_runs_not_judged", "exporter_ranks_alive"),
    ),
    "is constant": (
        *("gpu_mig_instances", "gpu_mig_memory_total_bytes", "gpu_mig_memory_used_bytes"),
        *("gpu_encoder_busy_seconds_total", "gpu_decoder_busy_seconds_total"),
        *("gpu_nvlink_links", "gpu_nvlink_links_active", "gpu_nvlink_errors_total"),
        *("gpu_xid_errors_total", "gpu_xid_last_timestamp_seconds", "exporter_gpus_seen", "exporter_gpus_expected"),
        *("gpu_memory_unused_since_timestamp_seconds", "gpu_culprit_runs", "run_capture_timestamp_seconds"),
        *("exporter_captures_total", "exporter_captures_failed_total"),
    ),
    "does not decrease": ("gpu_nvlink_bytes_total", "gpu_gpm_nvlink_bytes_total", "exporter_time_seconds"),
    "is below 0.5": ("exporter_collector_duration_seconds",),
}


def compare(about: str, scrapes: Sequence[Scrape]) -> Iterator[Check]:
    """Run nvidia-smi and compare its output with the scrapes around it, which a thread appends."""
    time.sleep(AROUND)
    began = time.time()
    ran = subprocess.run(["nvidia-smi", "-q", "-x"], check=True, capture_output=True, text=True, timeout=60)
    ended = time.time()
    time.sleep(AROUND)
    around = [scrape for scrape in scrapes if began - AROUND <= scrape.at <= ended + AROUND]
    yield from compare_document(about, around, ran.stdout)


def compare_document(about: str, scrapes: Sequence[Scrape], xml: str) -> Iterator[Check]:
    """Compare the first GPU of the document with the scrapes."""
    log = ElementTree.fromstring(xml)
    for row in ROWS:
        for labels, name in row.names.items():
            ours = values(scrapes, f"gpu_{row.metric}", *labels.split())
            theirs = read_number(log, row.path.replace("{}", name))
            yield judge(f"{about}: {row.metric} {labels}".strip(), ours, theirs, row.tolerance)


def read_number(log: ElementTree.Element, path: str) -> float | None:
    """Return the number in base units at the first alternative that has one."""
    function, _, rest = path.rpartition(":")
    if function == "count":
        return float(len(log.findall(f"gpu/{rest}")))
    for alternative in rest.split("|"):
        parent, _, names = f"gpu/{alternative}".rpartition("/")
        found = [element.text for name in names.split("+") for element in log.findall(f"{parent}/{name}")]
        numbers = [number for text in found if (number := quantity(text)) is not None]
        if len(numbers) == len(found) and (numbers or function == "sum"):
            return sum(numbers)
    return None


def quantity(text: str | None) -> float | None:
    """Return a value of nvidia-smi as a number in its base unit; None if it is no number with a known unit."""
    printed = (text or "").strip()
    match = NUMBER.fullmatch(printed)
    if match is None or match[2] not in UNITS:
        return {"Yes": 1.0, "No": 0.0}.get(printed)
    return float(match[1]) * UNITS[match[2]]


def judge_invariants(scrapes: Sequence[Scrape]) -> Iterator[Check]:
    """Check the condition for each series of the metrics without a reference value."""
    for text, metric in ((text, metric) for text, metrics in INVARIANT.items() for metric in metrics):
        histories: dict[Series, list[float]] = {}
        for key, value in (pair for scrape in scrapes for pair in scrape.select(metric).items()):
            histories.setdefault(key, []).append(value)
        broken = [key for key, seen in histories.items() if not HOLDS[text](seen)]
        shown = show(*(value for seen in histories.values() for value in seen))
        note = f"{text}; {len(histories)} series{f', broken by {broken[0]}' if broken else ''}"
        if metric.endswith("_info"):
            note += "".join(f"; {sorted(labels)}" for _, labels in histories)
        yield Check(metric, ok_if(not broken) if histories else "absent", shown, note=note)
