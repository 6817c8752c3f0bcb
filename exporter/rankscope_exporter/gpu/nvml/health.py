"""Memory health: ECC errors, remapped rows and retired pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import ask

ERROR_KINDS = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
# Since Turing only SRAM and DRAM are distinguished, earlier each kind of memory.
LOCATIONS = {
    "l1_cache": pynvml.NVML_MEMORY_LOCATION_L1_CACHE,
    "l2_cache": pynvml.NVML_MEMORY_LOCATION_L2_CACHE,
    "dram": pynvml.NVML_MEMORY_LOCATION_DRAM,
    "register_file": pynvml.NVML_MEMORY_LOCATION_REGISTER_FILE,
    "texture_memory": pynvml.NVML_MEMORY_LOCATION_TEXTURE_MEMORY,
    "texture_shm": pynvml.NVML_MEMORY_LOCATION_TEXTURE_SHM,
    "cbu": pynvml.NVML_MEMORY_LOCATION_CBU,
    "sram": pynvml.NVML_MEMORY_LOCATION_SRAM,
}
BANKS = ("max", "high", "partial", "low", "none")

ErrorCounts = Mapping[tuple[str, str], float | None]
"""Counts by kind and location."""


@dataclass(frozen=True)
class Repairs:
    """Row remapping (since Ampere) and page retirement (before) over the device's lifetime."""

    remapped_rows: Mapping[str, float | None]
    """Rows by kind of error."""
    remapping_pending: float | None
    """1 if a row will be remapped at the GPU's next reset."""
    remapping_failed: float | None
    """1 if remapping failed: the GPU needs replacement."""
    banks: Mapping[str, float | None]
    """Number of memory banks by available spare rows."""
    retired_pages: Mapping[str, float | None]
    """Pages by cause."""
    retirement_pending: float | None


def ecc_errors(device: Device, lifetime: bool) -> ErrorCounts:
    """Return the errors since the driver was loaded, or over the device's lifetime."""
    span = pynvml.NVML_AGGREGATE_ECC if lifetime else pynvml.NVML_VOLATILE_ECC
    return {
        (kind, location): ask(pynvml.nvmlDeviceGetMemoryErrorCounter, device.handle, kind_number, span, location_number)
        for kind, kind_number in ERROR_KINDS.items()
        for location, location_number in LOCATIONS.items()
    }


def repairs(device: Device) -> Repairs:
    """Return completed and pending repairs."""
    corrected, uncorrected, pending, failed, single, double, pages_pending = device.fields(
        pynvml.NVML_FI_DEV_REMAPPED_COR,
        pynvml.NVML_FI_DEV_REMAPPED_UNC,
        pynvml.NVML_FI_DEV_REMAPPED_PENDING,
        pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
        pynvml.NVML_FI_DEV_RETIRED_SBE,
        pynvml.NVML_FI_DEV_RETIRED_DBE,
        pynvml.NVML_FI_DEV_RETIRED_PENDING,
    )
    histogram = ask(pynvml.nvmlDeviceGetRowRemapperHistogram, device.handle)
    return Repairs(
        remapped_rows={"corrected": corrected, "uncorrected": uncorrected},
        remapping_pending=pending,
        remapping_failed=failed,
        banks={} if histogram is None else {spare: getattr(histogram, spare) for spare in BANKS},
        retired_pages={"single_bit": single, "double_bit": double},
        retirement_pending=pages_pending,
    )
