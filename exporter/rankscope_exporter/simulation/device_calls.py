"""What NVML answers about a simulated GPU's limits, errors, links and modes."""

from __future__ import annotations

from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.health import ERROR_KINDS, LOCATIONS
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.symbols import symbol

BAR1 = 2**30  # bytes mapped of a window as large as the memory
LOWEST_POWER_LIMIT = 0.3
THRESHOLDS = {  # °C, like those of an A100
    pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
    pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89,
    pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX: 95,
    pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 85,
}
LANES = 16
IDLE_PCIE_GENERATION = 1
BANKS = 640
# Since Turing two locations are told apart; by NVML's numbers.
ECC_LOCATIONS = {LOCATIONS[name]: name for name in ("dram", "sram")}
ECC_KINDS = {number: name for name, number in ERROR_KINDS.items()}


@symbol("nvmlDeviceGetBAR1MemoryInfo")
def _bar1(gpu: SimulatedGpu, _t: float, info: Any) -> None:
    info.bar1Total, info.bar1Used = gpu.model.memory, BAR1
    info.bar1Free = info.bar1Total - info.bar1Used


@symbol("nvmlDeviceGetPowerManagementDefaultLimit")
def _default_power_limit(gpu: SimulatedGpu, _t: float, milliwatts: Any) -> None:
    milliwatts.value = round(gpu.model.power_max * 1000)


@symbol("nvmlDeviceGetPowerManagementLimitConstraints")
def _power_limit_range(gpu: SimulatedGpu, _t: float, lowest: Any, highest: Any) -> None:
    lowest.value = round(gpu.model.power_max * LOWEST_POWER_LIMIT * 1000)
    highest.value = round(gpu.model.power_max * 1000)


@symbol("nvmlDeviceGetTemperatureThreshold", of=lambda model: not model.since("hopper"))
def _threshold(_gpu: SimulatedGpu, _t: float, threshold: Any, celsius: Any) -> None:
    celsius.value = THRESHOLDS[threshold.value]


@symbol("nvmlDeviceGetMarginTemperature", of=lambda model: model.since("hopper"))
def _margin(gpu: SimulatedGpu, t: float, info: Any) -> None:
    info.marginTemperature = round(THRESHOLDS[pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN] - gpu.temperature(t))


@symbol("nvmlDeviceGetMemoryErrorCounter")
def _memory_errors(gpu: SimulatedGpu, t: float, kind: Any, _span: Any, location: Any, count: Any) -> int | None:
    if location.value not in ECC_LOCATIONS:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    count.value = gpu.state(t).ecc.get(f"{ECC_KINDS[kind.value]}_{ECC_LOCATIONS[location.value]}", 0)
    return None


@symbol("nvmlDeviceGetRowRemapperHistogram", of=lambda model: model.since("ampere"))
def _row_remapper_histogram(_gpu: SimulatedGpu, _t: float, banks: Any) -> None:
    banks.max = BANKS


@symbol("nvmlDeviceGetCurrPcieLinkGeneration")
def _pcie_generation(gpu: SimulatedGpu, t: float, generation: Any) -> None:
    generation.value = IDLE_PCIE_GENERATION if gpu.is_idle(t) else gpu.model.pcie_generation


@symbol("nvmlDeviceGetMaxPcieLinkGeneration")
def _max_pcie_generation(gpu: SimulatedGpu, _t: float, generation: Any) -> None:
    generation.value = gpu.model.pcie_generation


@symbol("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth")
def _pcie_width(_gpu: SimulatedGpu, _t: float, lanes: Any) -> None:
    lanes.value = LANES


@symbol("nvmlDeviceGetPcieReplayCounter")
def _pcie_replays(_gpu: SimulatedGpu, _t: float, count: Any) -> None:
    count.value = 0


@symbol("nvmlDeviceGetPcieThroughput")
def _pcie_throughput(gpu: SimulatedGpu, t: float, _counter: Any, kilobytes_per_second: Any) -> None:
    kilobytes_per_second.value = gpu.utilization(t) * 10_000


@symbol("nvmlDeviceGetNvLinkState", of=lambda model: model.nvlinks > 0)
def _nvlink_state(gpu: SimulatedGpu, t: float, link: int, state: Any) -> int | None:
    if link >= gpu.model.nvlinks:
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    state.value = link < gpu.model.nvlinks - gpu.state(t).nvlinks_down
    return None


@symbol("nvmlDeviceGetPersistenceMode")
def _persistence(_gpu: SimulatedGpu, _t: float, mode: Any) -> None:
    mode.value = pynvml.NVML_FEATURE_ENABLED


@symbol("nvmlDeviceGetComputeMode")
def _compute_mode(_gpu: SimulatedGpu, _t: float, mode: Any) -> None:
    mode.value = pynvml.NVML_COMPUTEMODE_DEFAULT


@symbol("nvmlDeviceGetVirtualizationMode")
def _virtualization_mode(_gpu: SimulatedGpu, _t: float, mode: Any) -> None:
    mode.value = pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE


@symbol("nvmlDeviceGetMigMode", of=lambda model: model.since("ampere"))
def _mig_mode(gpu: SimulatedGpu, _t: float, current: Any, pending: Any) -> None:
    current.value = pending.value = bool(gpu.model.mig)


@symbol("nvmlDeviceGetMaxMigDeviceCount")
def _most_mig_devices(gpu: SimulatedGpu, _t: float, count: Any) -> None:
    count.value = 7 if gpu.model.since("ampere") else 0


@symbol("nvmlDeviceGetEccMode")
def _ecc_mode(_gpu: SimulatedGpu, _t: float, current: Any, pending: Any) -> None:
    current.value = pending.value = pynvml.NVML_FEATURE_ENABLED


@symbol("nvmlDeviceGetGpuFabricInfoV", of=lambda model: model.since("hopper") and model.nvlinks > 0)
def _fabric(_gpu: SimulatedGpu, _t: float, info: Any) -> int | None:
    if info.version != pynvml.nvmlGpuFabricInfo_v2:
        return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    info.state, info.status = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_SUCCESS
    return None
