"""MIG: the instances that a GPU is split into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, Memory
from rankscope_exporter.gpu.nvml.mig import MigInstance, mig_instances

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


GPU = GpuMetrics[Instances](since="Ampere")
METRICS = (
    GPU.gauge(
        "mig_instances",
        "MIG devices that the GPU is split into.",
        len,
        source="nvmlDeviceGetMigDeviceHandleByIndex",
    ),
    GPU.gauge(
        "mig_info",
        "One MIG device: its ids, its own UUID and its profile.",
        _info,
        "gpu_instance",
        "compute_instance",
        "mig_uuid",
        "name",
        source="nvmlDeviceGetGpuInstanceId, nvmlDeviceGetComputeInstanceId, nvmlDeviceGetUUID, nvmlDeviceGetName",
    ),
    GPU.gauge(
        "mig_memory_total_bytes",
        "Memory of a GPU instance.",
        _memory(lambda memory: memory.total),
        "gpu_instance",
        source="nvmlDeviceGetMemoryInfo of the MIG device",
    ),
    GPU.gauge(
        "mig_memory_used_bytes",
        "Memory that processes hold on a GPU instance, with what the driver reserves.",
        _memory(lambda memory: memory.used),
        "gpu_instance",
        source="nvmlDeviceGetMemoryInfo of the MIG device",
    ),
)

COLLECTOR = GpuCollector("mig", "MIG instances and their memory", lambda: Cached(read, EVERY), METRICS)
