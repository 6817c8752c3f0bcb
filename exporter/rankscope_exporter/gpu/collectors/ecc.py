"""ECC memory errors, and the repairs that they caused."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.health import ErrorCounts, Repairs, ecc_errors, repairs

# Seconds. A read is 33 calls. Urgent errors also arrive as events at once: XID 48, 63, 64, 94 and 95.
EVERY = 15.0


@dataclass(frozen=True)
class Ecc:
    """Errors since the driver was loaded and over the GPU's lifetime, and repairs."""

    errors: ErrorCounts
    lifetime_errors: ErrorCounts
    repairs: Repairs


def read(device: Device, _tick: Tick) -> Ecc:
    """Read both error counts and the repairs."""
    return Ecc(ecc_errors(device, lifetime=False), ecc_errors(device, lifetime=True), repairs(device))


GPU = GpuMetrics[Ecc](since="Ampere")
METRICS = (
    GPU.counter(
        "ecc_errors_total",
        "Memory errors since the driver was loaded, by kind and location (since Turing only `sram` and `dram`).",
        lambda ecc: ecc.errors,
        "kind",
        "location",
        source="nvmlDeviceGetMemoryErrorCounter(VOLATILE_ECC)",
        since="Fermi",
    ),
    GPU.counter(
        "ecc_lifetime_errors_total",
        "Memory errors over the GPU's lifetime.",
        lambda ecc: ecc.lifetime_errors,
        "kind",
        "location",
        source="nvmlDeviceGetMemoryErrorCounter(AGGREGATE_ECC)",
        since="Fermi",
    ),
    GPU.counter(
        "remapped_rows_total",
        "Memory rows replaced by spare rows over the GPU's lifetime, by the kind of error that caused it.",
        lambda ecc: ecc.repairs.remapped_rows,
        "kind",
        source="nvmlDeviceGetFieldValues(REMAPPED_COR, REMAPPED_UNC)",
    ),
    GPU.gauge(
        "row_remapping_pending",
        "1 if a row will be remapped at the GPU's next reset.",
        lambda ecc: ecc.repairs.remapping_pending,
        source="nvmlDeviceGetFieldValues(REMAPPED_PENDING)",
    ),
    GPU.gauge(
        "row_remapping_failed",
        "1 if a row could not be remapped: the GPU qualifies for replacement.",
        lambda ecc: ecc.repairs.remapping_failed,
        source="nvmlDeviceGetFieldValues(REMAPPED_FAILURE)",
    ),
    GPU.gauge(
        "row_remapping_banks",
        "Memory banks by available spare rows: `max` (all available), `high`, `partial`, `low`, `none`.",
        lambda ecc: ecc.repairs.banks,
        "spare_rows",
        source="nvmlDeviceGetRowRemapperHistogram",
    ),
    GPU.counter(
        "retired_pages_total",
        "Memory pages retired over the GPU's lifetime, by the kind of error that caused it.",
        lambda ecc: ecc.repairs.retired_pages,
        "cause",
        source="nvmlDeviceGetFieldValues(RETIRED_SBE, RETIRED_DBE)",
        since="Kepler, to Turing",
    ),
    GPU.gauge(
        "page_retirement_pending",
        "1 if a page will be retired at the GPU's next reset.",
        lambda ecc: ecc.repairs.retirement_pending,
        source="nvmlDeviceGetFieldValues(RETIRED_PENDING)",
        since="Kepler, to Turing",
    ),
)

COLLECTOR = GpuCollector("ecc", "memory errors, row remapping, retired pages", lambda: Cached(read, EVERY), METRICS)
