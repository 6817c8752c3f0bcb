"""NVML calls for a simulated GPU's limits, errors, links and modes."""

from __future__ import annotations

from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.health import ERROR_KINDS, LOCATIONS
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.symbols import structs, symbol, values

BAR1 = 2**30  # mapped bytes; the window is as large as the memory
LOWEST_POWER_LIMIT = 0.3
SLOWDOWN = 89
THRESHOLDS = {  # °C, like those of an A100
    pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
    pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: SLOWDOWN,
    pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX: 95,
    pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 85,
}
LANES = 16
IDLE_PCIE_GENERATION = 1
BANKS = 640
# Since Turing NVML distinguishes two locations. By NVML's number.
ECC_LOCATIONS = {LOCATIONS[name]: name for name in ("dram", "sram")}
ECC_KINDS = {number: name for name, number in ERROR_KINDS.items()}


values(
    {
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu, _: round(gpu.model.power_max * 1000),  # milliwatts
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu, t: (
            IDLE_PCIE_GENERATION if gpu.is_idle(t) else gpu.state(t).pcie_generation or gpu.model.pcie_generation
        ),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu, _: gpu.model.pcie_generation,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu, t: gpu.state(t).pcie_width or LANES,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _gpu, _: LANES,
        "nvmlDeviceGetPcieReplayCounter": lambda _gpu, _: 0,
        "nvmlDeviceGetPcieThroughput": lambda gpu, t: gpu.utilization(t) * 10_000,  # KB/s
        "nvmlDeviceGetPersistenceMode": lambda gpu, t: int(gpu.state(t).persistence),
        "nvmlDeviceGetComputeMode": lambda _gpu, _: int(pynvml.NVML_COMPUTEMODE_DEFAULT),
        "nvmlDeviceGetVirtualizationMode": lambda _gpu, _: int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE),
        "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu, _: (
            round(gpu.model.power_max * LOWEST_POWER_LIMIT * 1000),
            round(gpu.model.power_max * 1000),
        ),
        "nvmlDeviceGetEccMode": lambda _gpu, _: (pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_ENABLED),
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu, _: 7 if gpu.model.since("ampere") else 0,
    }
)
values(
    {"nvmlDeviceGetMigMode": lambda gpu, _: (bool(gpu.model.mig), bool(gpu.model.mig))},  # current and pending
    supported_by=lambda model: model.since("ampere"),
)
structs(
    {
        "nvmlDeviceGetBAR1MemoryInfo": lambda gpu, _: {
            "bar1Total": gpu.model.memory,
            "bar1Used": BAR1,
            "bar1Free": gpu.model.memory - BAR1,
        }
    }
)
structs(
    {"nvmlDeviceGetMarginTemperature": lambda gpu, t: {"marginTemperature": round(SLOWDOWN - gpu.temperature(t))}},
    supported_by=lambda model: model.since("hopper"),
)
structs(
    {"nvmlDeviceGetRowRemapperHistogram": lambda _gpu, _: {"max": BANKS}},
    supported_by=lambda model: model.since("ampere"),
)


@symbol("nvmlDeviceGetTemperatureThreshold", supported_by=lambda model: not model.since("hopper"))
def _threshold(_gpu: SimulatedGpu, _t: float, threshold: Any, celsius: Any) -> None:
    celsius.value = THRESHOLDS[threshold.value]


@symbol("nvmlDeviceGetMemoryErrorCounter")
def _memory_errors(gpu: SimulatedGpu, t: float, kind: Any, _span: Any, location: Any, count: Any) -> int | None:
    if location.value not in ECC_LOCATIONS:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    count.value = gpu.state(t).ecc.get(f"{ECC_KINDS[kind.value]}_{ECC_LOCATIONS[location.value]}", 0)
    return None


@symbol("nvmlDeviceGetNvLinkState", supported_by=lambda model: model.nvlinks > 0)
def _nvlink_state(gpu: SimulatedGpu, t: float, link: int, state: Any) -> int | None:
    if link >= gpu.model.nvlinks:
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    state.value = link < gpu.model.nvlinks - gpu.state(t).nvlinks_down
    return None


@symbol("nvmlDeviceGetGpuFabricInfoV", supported_by=lambda model: model.since("hopper") and model.nvlinks > 0)
def _fabric(_gpu: SimulatedGpu, _t: float, info: Any) -> int | None:
    if info.version != pynvml.nvmlGpuFabricInfo_v2:
        return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    info.state, info.status = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_SUCCESS
    return None
