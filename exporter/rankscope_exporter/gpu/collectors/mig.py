"""MIG: the instances that a GPU is split into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rankscope_exporter.gpu.nvml.device import Device, Memory
from rankscope_exporter.gpu.nvml.mig import MigInstance, mig_instances
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, gauge

EVERY = 5.0  # seconds: some ten calls an instance

Instances = Sequence[MigInstance]


def read(device: Device, _tick: Tick) -> Instances | None:
    """The instances now; None where MIG is not on."""
    return mig_instances(device)


def _info(instances: Instances) -> Mapping[tuple[str, ...], float]:
    return {(str(i.gpu_instance), str(i.compute_instance), i.uuid, i.name): 1 for i in instances}


def _memory(size: Callable[[Memory], int]) -> Callable[[Instances], Mapping[str, float]]:
    """By GPU instance, whose memory all of its compute instances share."""
    return lambda instances: {str(i.gpu_instance): size(i.memory) for i in instances if i.memory}


METRICS: tuple[GpuMetric[Instances], ...] = (
    gauge(
        "mig_instances",
        "MIG devices that the GPU is split into.",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        len,
        since="Ampere",
    ),
    gauge(
        "mig_info",
        "One MIG device: its ids, its own UUID and its profile.",
        "nvmlDeviceGetGpuInstanceId, nvmlDeviceGetComputeInstanceId, nvmlDeviceGetUUID, nvmlDeviceGetName",
        _info,
        labels=("gpu_instance", "compute_instance", "mig_uuid", "name"),
        since="Ampere",
    ),
    gauge(
        "mig_memory_total_bytes",
        "Memory of a GPU instance.",
        "nvmlDeviceGetMemoryInfo of the MIG device",
        _memory(lambda memory: memory.total),
        labels=("gpu_instance",),
        since="Ampere",
    ),
    gauge(
        "mig_memory_used_bytes",
        "Memory that processes hold on a GPU instance, with what the driver reserves.",
        "nvmlDeviceGetMemoryInfo of the MIG device",
        _memory(lambda memory: memory.used),
        labels=("gpu_instance",),
        since="Ampere",
    ),
)

SOURCE = GpuSource("mig", "MIG instances and their memory", lambda: Seldom(read, EVERY), METRICS)
