"""MIG: the instances of a split GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics
from rankscope_exporter.gpu.nvml.device import Memory
from rankscope_exporter.gpu.nvml.mig import MigInstance, mig_instances

EVERY = 5.0  # seconds: about ten driver calls per instance

Instances = Sequence[MigInstance]


def _info(instances: Instances) -> Mapping[tuple[str, ...], float]:
    return {(str(i.gpu_instance), str(i.compute_instance), i.uuid, i.name): 1 for i in instances}


def _memory(size: Callable[[Memory], int]) -> Callable[[Instances], Mapping[str, float]]:
    """Return a function that maps each GPU instance to a size. Its compute instances share the memory."""
    return lambda instances: {str(i.gpu_instance): size(i.memory) for i in instances if i.memory}


GPU = GpuMetrics[Instances](since="Ampere")
METRICS = (
    GPU.gauge(
        "mig_instances",
        "Number of MIG devices of the GPU.",
        len,
        source="nvmlDeviceGetMigDeviceHandleByIndex",
    ),
    GPU.gauge(
        "mig_info",
        "A MIG device: its ids, UUID and profile.",
        _info,
        "gpu_instance",
        "compute_instance",
        "mig_uuid",
        "name",
        source="nvmlDeviceGetGpuInstanceId, nvmlDeviceGetComputeInstanceId, nvmlDeviceGetUUID, nvmlDeviceGetName",
    ),
    GPU.gauge(
        "mig_memory_total_bytes",
        "Total memory of a GPU instance.",
        _memory(lambda memory: memory.total),
        "gpu_instance",
        source="nvmlDeviceGetMemoryInfo of the MIG device",
    ),
    GPU.gauge(
        "mig_memory_used_bytes",
        "Memory used on a GPU instance by processes and the driver.",
        _memory(lambda memory: memory.used),
        "gpu_instance",
        source="nvmlDeviceGetMemoryInfo of the MIG device",
    ),
)

COLLECTOR = GpuCollector(
    "mig", "MIG instances and their memory", lambda: Cached(lambda device, _: mig_instances(device), EVERY), METRICS
)
