"""NVML calls for a simulated GPU's identity and activity. symbols.py has the calling convention."""

from __future__ import annotations

from functools import partial
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import CLOCK_EVENT_REASONS
from rankscope_exporter.simulation import device_calls, field_values, gpm
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.mig import MigDevice
from rankscope_exporter.simulation.symbols import GPU_FUNCTIONS, structs, symbol, values

NO_INSTANCE = 0xFFFFFFFF  # id for a GPU without MIG

BITS = {name: bit for bit, name in CLOCK_EVENT_REASONS.items()}
# Engines with a ring of samples, and their busy time as a share of the GPU's.
ENGINES = {
    pynvml.NVML_GPU_UTILIZATION_SAMPLES: 1.0,
    pynvml.NVML_MEMORY_UTILIZATION_SAMPLES: 0.5,
    pynvml.NVML_ENC_UTILIZATION_SAMPLES: 0.0,
    pynvml.NVML_DEC_UTILIZATION_SAMPLES: 0.0,
}
NO_VIDEO = 0, 166_666  # percent, and the period in microseconds
CLOCKS = {pynvml.NVML_CLOCK_MEM: "memory_clock", pynvml.NVML_CLOCK_VIDEO: "video_clock"}


def _clock_event_reasons(gpu: SimulatedGpu, t: float) -> int:
    return sum(BITS[reason] for reason in gpu.reasons(t))


values(
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


values(
    {
        "nvmlDeviceGetGpuInstanceId": lambda device, _: device.gpu_instance,
        "nvmlDeviceGetComputeInstanceId": lambda device, _: device.compute_instance,
    },
    supported_by=lambda model: bool(model.mig),
)
values(
    {"nvmlDeviceGetEncoderUtilization": lambda _gpu, _: NO_VIDEO},
    supported_by=lambda model: model.encodes and not model.mig,
)
values({"nvmlDeviceGetDecoderUtilization": lambda _gpu, _: NO_VIDEO}, supported_by=lambda model: not model.mig)
structs(
    {
        "nvmlDeviceGetPciInfo_v3": lambda gpu, _: {"busId": gpu.pci_bus_id},
        "nvmlDeviceGetMemoryInfo": lambda gpu, t: _memory(gpu, used=gpu.memory_used(t) + gpu.memory_reserved),
        "nvmlDeviceGetMemoryInfo_v2": lambda gpu, t: _memory(
            gpu, used=gpu.memory_used(t), reserved=gpu.memory_reserved
        ),
    }
)
structs(
    {
        "nvmlDeviceGetUtilizationRates": lambda gpu, t: {
            "gpu": gpu.utilization(t),
            "memory": round(gpu.utilization(t) * ENGINES[pynvml.NVML_MEMORY_UTILIZATION_SAMPLES]),
        }
    },
    supported_by=lambda model: not model.mig,
)


def _memory(gpu: SimulatedGpu | MigDevice, **parts: int) -> dict[str, int]:
    return {"total": gpu.model.memory, **parts, "free": gpu.model.memory - sum(parts.values())}


@symbol("nvmlDeviceGetName")
def _name(gpu: SimulatedGpu, _t: float, buffer: Any, _size: Any) -> None:
    buffer.value = gpu.name.encode()


@symbol("nvmlDeviceGetUUID")
def _uuid(gpu: SimulatedGpu, _t: float, buffer: Any, _size: Any) -> None:
    buffer.value = gpu.uuid.encode()


@symbol("nvmlDeviceGetClockInfo")
def _clock(gpu: SimulatedGpu, t: float, domain: Any, megahertz: Any) -> None:
    other = CLOCKS.get(domain.value)
    megahertz.value = round(getattr(gpu.model, other) if other else gpu.sm_clock(t))


@symbol("nvmlDeviceGetMaxClockInfo")
def _max_clock(gpu: SimulatedGpu, _t: float, domain: Any, megahertz: Any) -> None:
    megahertz.value = round(getattr(gpu.model, CLOCKS.get(domain.value, "sm_clock")))


def _fill_processes(context: str, gpu: SimulatedGpu, t: float, count: Any, array: Any) -> int | None:
    processes = [process for process in gpu.processes(t) if context in process.contexts]
    capacity = 0 if array is None else count.value
    count.value = len(processes)
    if len(processes) > capacity:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for index, process in enumerate(processes):
        array[index].pid, array[index].usedGpuMemory = process.pid, process.memory
        array[index].gpuInstanceId = array[index].computeInstanceId = NO_INSTANCE
    return None


symbol("nvmlDeviceGetComputeRunningProcesses_v3")(partial(_fill_processes, "compute"))
symbol("nvmlDeviceGetGraphicsRunningProcesses_v3")(partial(_fill_processes, "graphics"))


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
