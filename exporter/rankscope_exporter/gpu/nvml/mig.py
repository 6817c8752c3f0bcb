"""MIG: the instances that a GPU is split into."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from rankscope_exporter.gpu.nvml.device import Device, Memory
from rankscope_exporter.gpu.nvml.errors import DriverError, ask


@dataclass(frozen=True)
class MigInstance:
    """One MIG device: a compute instance within a GPU instance, which owns the memory."""

    gpu_instance: int
    compute_instance: int
    uuid: str
    name: str
    memory: Memory | None


def mig_instances(device: Device) -> list[MigInstance] | None:
    """All of them; None where MIG is not on."""
    mode = ask(pynvml.nvmlDeviceGetMigMode, device.handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    most = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, device.handle) or 0
    found = (_instance(device, index) for index in range(most))
    return [instance for instance in found if instance]


def gpu_instances(device: Device) -> list[int]:
    """The ids of the GPU instances, each once; empty where MIG is not on."""
    return sorted({instance.gpu_instance for instance in mig_instances(device) or ()})


def _instance(device: Device, index: int) -> MigInstance | None:
    try:
        handle = ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device.handle, index)
    except DriverError as error:
        if error.code == pynvml.NVML_ERROR_NOT_FOUND:  # there may be indices between instances that nobody has
            return None
        raise
    if handle is None:
        return None
    info = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return MigInstance(
        gpu_instance=ask(pynvml.nvmlDeviceGetGpuInstanceId, handle),
        compute_instance=ask(pynvml.nvmlDeviceGetComputeInstanceId, handle),
        uuid=ask(pynvml.nvmlDeviceGetUUID, handle) or "",
        name=ask(pynvml.nvmlDeviceGetName, handle) or "",
        memory=None if info is None else Memory(info.total, info.used, info.free),
    )
