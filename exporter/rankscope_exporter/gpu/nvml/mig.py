"""MIG: the instances of a split GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from rankscope_exporter.gpu.nvml.device import Device, Memory
from rankscope_exporter.gpu.nvml.errors import DriverError, ask


@dataclass(frozen=True)
class MigInstance:
    """One MIG device: a compute instance of a GPU instance, which owns the memory."""

    gpu_instance: int
    compute_instance: int
    uuid: str
    name: str
    memory: Memory | None


def mig_instances(device: Device) -> list[MigInstance] | None:
    """Return all MIG instances; None if MIG is disabled."""
    mode = ask(pynvml.nvmlDeviceGetMigMode, device.handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    count = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, device.handle) or 0
    found = (_instance(device, index) for index in range(count))
    return [instance for instance in found if instance]


def gpu_instances(device: Device) -> list[int]:
    """Return the distinct ids of the GPU instances; empty if MIG is disabled."""
    return sorted({instance.gpu_instance for instance in mig_instances(device) or ()})


def _instance(device: Device, index: int) -> MigInstance | None:
    try:
        handle = ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device.handle, index)
    except DriverError as error:
        if error.code == pynvml.NVML_ERROR_NOT_FOUND:  # indices between instances may be unused
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
