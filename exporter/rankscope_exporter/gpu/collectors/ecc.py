"""Memory errors that ECC has seen, and what was repaired because of them."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.health import ErrorCounts, Repairs, ecc_errors, repairs
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, counter, gauge

# Seconds. It is 33 calls, and none of it changes what anybody does within less: XID 48, 63, 64, 94 and 95 come at once.
EVERY = 15.0


@dataclass(frozen=True)
class Ecc:
    """Errors since the driver was loaded and over the GPU's life, and its repairs."""

    errors: ErrorCounts
    lifetime_errors: ErrorCounts
    repairs: Repairs


def read(device: Device, _tick: Tick) -> Ecc:
    """All of it."""
    return Ecc(ecc_errors(device, lifetime=False), ecc_errors(device, lifetime=True), repairs(device))


METRICS: tuple[GpuMetric[Ecc], ...] = (
    counter(
        "ecc_errors_total",
        "Memory errors since the driver was loaded, by kind and location (since Turing only `sram` and `dram`).",
        "nvmlDeviceGetMemoryErrorCounter(VOLATILE_ECC)",
        lambda ecc: ecc.errors,
        labels=("kind", "location"),
        since="Fermi",
    ),
    counter(
        "ecc_lifetime_errors_total",
        "Memory errors over the GPU's whole life.",
        "nvmlDeviceGetMemoryErrorCounter(AGGREGATE_ECC)",
        lambda ecc: ecc.lifetime_errors,
        labels=("kind", "location"),
        since="Fermi",
    ),
    counter(
        "remapped_rows_total",
        "Rows of memory replaced by spare ones over the GPU's life, by the kind of error that was the reason.",
        "nvmlDeviceGetFieldValues(REMAPPED_COR, REMAPPED_UNC)",
        lambda ecc: ecc.repairs.remapped_rows,
        labels=("kind",),
        since="Ampere",
    ),
    gauge(
        "row_remapping_pending",
        "1 if a row will be remapped at the GPU's next reset.",
        "nvmlDeviceGetFieldValues(REMAPPED_PENDING)",
        lambda ecc: ecc.repairs.remapping_pending,
        since="Ampere",
    ),
    gauge(
        "row_remapping_failed",
        "1 if a row could not be remapped: the GPU qualifies for exchange.",
        "nvmlDeviceGetFieldValues(REMAPPED_FAILURE)",
        lambda ecc: ecc.repairs.remapping_failed,
        since="Ampere",
    ),
    gauge(
        "row_remapping_banks",
        "Banks of memory by how many spare rows they have left: `max` is all, then `high`, `partial`, `low`, `none`.",
        "nvmlDeviceGetRowRemapperHistogram",
        lambda ecc: ecc.repairs.banks,
        labels=("spare_rows",),
        since="Ampere",
    ),
    counter(
        "retired_pages_total",
        "Pages of memory taken out of use over the GPU's life, by the kind of error that was the reason.",
        "nvmlDeviceGetFieldValues(RETIRED_SBE, RETIRED_DBE)",
        lambda ecc: ecc.repairs.retired_pages,
        labels=("cause",),
        since="Kepler, to Turing",
    ),
    gauge(
        "page_retirement_pending",
        "1 if a page will be taken out of use at the GPU's next reset.",
        "nvmlDeviceGetFieldValues(RETIRED_PENDING)",
        lambda ecc: ecc.repairs.retirement_pending,
        since="Kepler, to Turing",
    ),
)

SOURCE = GpuSource("ecc", "memory errors, row remapping, retired pages", lambda: Seldom(read, EVERY), METRICS)
