"""NVML calls for a simulated GPU's identity and activity. symbols.py has the calling convention."""

from __future__ import annotations

from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import CLOCK_EVENT_REASONS
from rankscope_exporter.simulation import device_calls, field_values, gpm
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.mig import MigDevice
from rankscope_exporter.simulation.symbols import GPU_FUNCTIONS, numbers, symbol

NO_INSTANCE = 0xFFFFFFFF  # id for a GPU without MIG

BITS = {name: bit for bit, name in CLOCK_EVENT_REASONS.items()}
# Engines with a ring of samples, and their busy time as a share of the GPU's.
ENGINES = {
    pynvml.NVML_GPU_UTILIZATION_SAMPLES: 1.0,
    pynvml.NVML_MEMORY_UTILIZATION_SAMPLES: 0.5,
    pynvml.NVML_ENC_UTILIZATION_SAMPLES: 0.0,
    pynvml.NVML_DEC_UTILIZATION_SAMPLES: 0.0,
}
CLOCKS = {pynvml.NVML_CLOCK_MEM: "memory_clock", pynvml.NVML_CLOCK_VIDEO: "video_clock"}


def _clock_event_reasons(gpu: SimulatedGpu, t: float) -> int:
    return sum(BITS[reason] for reason in gpu.reasons(t))


numbers(
    {
        "nvmlDeviceGetIndex": lambda gpu, _: gpu.index,
        "nvmlDeviceGetMinorNumber": lambda gpu, _: gpu.index,
        "nvmlDeviceGetPerformanceState": lambda gpu, t: 8 if gpu.is_idle(t) else 0,
        "nvmlDeviceGetMemoryBusWidth": lambda gpu, _: gpu.model.memory_bus,
        "nvmlDeviceGetPowerUsage": lambda gpu, t: round(gpu.power(t) * 1000),  # milliwatts
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu, _: round(gpu.model.power_max * 1000),
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu, t: round(gpu.energy(t) * 1000),  # millijoules
        "nvmlDeviceGetTemperature": lambda gpu, t: round(gpu.temperature(t)),
        "nvmlDeviceGetCurrentClocksEventReasons": _clock_event_reasons,
        "nvmlDeviceGetCurrentClocksThrottleReasons": _clock_event_reasons,
        "nvmlDeviceGetSupportedEventTypes": lambda _gpu, _: int(pynvml.nvmlEventTypeXidCriticalError),
    }
)


@symbol("nvmlDeviceGetName")
def _name(gpu: SimulatedGpu, _t: float, buffer: Any, _size: Any) -> None:
    buffer.value = gpu.name.encode()


@symbol("nvmlDeviceGetUUID")
def _uuid(gpu: SimulatedGpu, _t: float, buffer: Any, _size: Any) -> None:
    buffer.value = gpu.uuid.encode()


@symbol("nvmlDeviceGetPciInfo_v3")
def _pci(gpu: SimulatedGpu, _t: float, info: Any) -> None:
    info.busId = gpu.pci_bus_id


@symbol("nvmlDeviceGetUtilizationRates", supported_by=lambda model: not model.mig)
def _utilization(gpu: SimulatedGpu, t: float, rates: Any) -> None:
    rates.gpu = gpu.utilization(t)
    rates.memory = round(rates.gpu * ENGINES[pynvml.NVML_MEMORY_UTILIZATION_SAMPLES])


@symbol("nvmlDeviceGetEncoderUtilization", supported_by=lambda model: model.encodes and not model.mig)
@symbol("nvmlDeviceGetDecoderUtilization", supported_by=lambda model: not model.mig)
def _video(_gpu: SimulatedGpu, _t: float, percent: Any, period_us: Any) -> None:
    percent.value, period_us.value = 0, 166_666


@symbol("nvmlDeviceGetGpuInstanceId", supported_by=lambda model: bool(model.mig))
def _gpu_instance(gpu: MigDevice, _t: float, number: Any) -> None:
    number.value = gpu.gpu_instance


@symbol("nvmlDeviceGetComputeInstanceId", supported_by=lambda model: bool(model.mig))
def _compute_instance(gpu: MigDevice, _t: float, number: Any) -> None:
    number.value = gpu.compute_instance


@symbol("nvmlDeviceGetMemoryInfo")
def _memory(gpu: SimulatedGpu, t: float, info: Any) -> None:
    info.total = gpu.model.memory
    info.used = gpu.memory_used(t) + gpu.memory_reserved
    info.free = info.total - info.used


@symbol("nvmlDeviceGetMemoryInfo_v2")
def _memory_v2(gpu: SimulatedGpu, t: float, info: Any) -> None:
    info.total, info.reserved, info.used = gpu.model.memory, gpu.memory_reserved, gpu.memory_used(t)
    info.free = info.total - info.reserved - info.used


@symbol("nvmlDeviceGetClockInfo")
def _clock(gpu: SimulatedGpu, t: float, domain: Any, megahertz: Any) -> None:
    other = CLOCKS.get(domain.value)
    megahertz.value = round(getattr(gpu.model, other) if other else gpu.sm_clock(t))


@symbol("nvmlDeviceGetMaxClockInfo")
def _max_clock(gpu: SimulatedGpu, _t: float, domain: Any, megahertz: Any) -> None:
    megahertz.value = round(getattr(gpu.model, CLOCKS.get(domain.value, "sm_clock")))


@symbol("nvmlDeviceGetComputeRunningProcesses_v3")
def _compute_processes(gpu: SimulatedGpu, t: float, count: Any, array: Any) -> int | None:
    return _fill_processes(gpu, t, "compute", count, array)


@symbol("nvmlDeviceGetGraphicsRunningProcesses_v3")
def _graphics_processes(gpu: SimulatedGpu, t: float, count: Any, array: Any) -> int | None:
    return _fill_processes(gpu, t, "graphics", count, array)


def _fill_processes(gpu: SimulatedGpu, t: float, context: str, count: Any, array: Any) -> int | None:
    processes = [process for process in gpu.processes(t) if context in process.contexts]
    capacity = 0 if array is None else count.value
    count.value = len(processes)
    if len(processes) > capacity:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for index, process in enumerate(processes):
        array[index].pid, array[index].usedGpuMemory = process.pid, process.memory
        array[index].gpuInstanceId = array[index].computeInstanceId = NO_INSTANCE
    return None


@symbol("nvmlDeviceGetSamples", supported_by=lambda model: not model.mig)
def _samples(
    gpu: SimulatedGpu, t: float, kind: Any, since_us: Any, value_type: Any, count: Any, array: Any
) -> int | None:
    share = ENGINES.get(kind.value)
    if share is None or (kind.value == pynvml.NVML_ENC_UTILIZATION_SAMPLES and not gpu.model.encodes):
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    # Compared in whole microseconds, as returned; starting one second earlier avoids rounding errors.
    samples = gpu.samples(t, since_us.value / 1e6 - gpu.start_unix - 1)
    stamped = [(round((gpu.start_unix + end) * 1e6), round(percent * share)) for end, percent in samples]
    newer = [sample for sample in stamped if sample[0] > since_us.value]
    if not newer:
        return int(pynvml.NVML_ERROR_NOT_FOUND)
    value_type.value = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    if array is not None:
        for index, (stamp, percent) in enumerate(newer[: count.value]):
            array[index].timeStamp, array[index].sampleValue.uiVal = stamp, percent
        count.value = min(count.value, len(newer))
    else:
        count.value = len(newer)
    return None


# Symbols that a scenario may block or fail: all calls on one GPU. These modules register theirs when imported.
REGISTERED_BY = (device_calls, field_values, gpm)
SYMBOLS = (*GPU_FUNCTIONS, *gpm.SYMBOLS, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceRegisterEvents")
