"""What wears out in a GPU: memory errors, and the rows and pages that were taken out of use because of them."""

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
# Since Turing only SRAM and DRAM are told apart; before, each memory by itself.
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
"""By kind and location."""


@dataclass(frozen=True)
class Repairs:
    """Row remapping (Ampere and later) and page retirement (before it), over the device's whole life."""

    remapped_rows: Mapping[str, float | None]
    """By kind of the error."""
    remapping_pending: float | None
    """1 if a remapping waits for the GPU's next reset."""
    remapping_failed: float | None
    """1 if a remapping has failed: the GPU is to be exchanged."""
    banks: Mapping[str, float | None]
    """Banks of memory by how many spare rows they have left."""
    retired_pages: Mapping[str, float | None]
    """By cause."""
    retirement_pending: float | None


def ecc_errors(device: Device, lifetime: bool) -> ErrorCounts:
    """Since the driver was loaded, or over the device's whole life."""
    span = pynvml.NVML_AGGREGATE_ECC if lifetime else pynvml.NVML_VOLATILE_ECC
    return {
        (kind, location): ask(pynvml.nvmlDeviceGetMemoryErrorCounter, device.handle, kind_number, span, location_number)
        for kind, kind_number in ERROR_KINDS.items()
        for location, location_number in LOCATIONS.items()
    }


def repairs(device: Device) -> Repairs:
    """What was repaired, and what is still to be."""
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
