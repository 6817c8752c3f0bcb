"""The labels that dcgm-exporter puts on a GPU: what it is, which instance of it, and who holds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from rankscope_exporter.exposition.metric import MetricTable
from rankscope_exporter.gpu.allocation.holder import labels as labels_of_holders
from rankscope_exporter.gpu.collector import Gpu
from rankscope_exporter.gpu.collectors.allocation import Allocation
from rankscope_exporter.gpu.collectors.gpu import Identity
from rankscope_exporter.gpu.nvml.mig import MigInstance

R = TypeVar("R")
Part = TypeVar("Part")

# In the order of dcgm-exporter's template (internal/pkg/rendermetrics). One that is empty is absent to Prometheus.
IDENTITY = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION")
INSTANCE = ("GPU_I_PROFILE", "GPU_I_ID")
HOLDER = ("hpc_job", "container", "namespace", "pod")
LABELS = (*IDENTITY, *INSTANCE, *HOLDER)

# The same as HOLDER in rankscope_gpu_allocation_info.
OUR_HOLDER = ("slurm_job_id", "k8s_container", "k8s_namespace", "k8s_pod")
NO_INSTANCE = ("",) * len(INSTANCE)
NOBODY = ("",) * len(HOLDER)

# NVML names a MIG device "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"; without the compute instance's part that is the
# profile of the GPU instance.
PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)$")


def dcgm_metrics(part: Callable[[R], Part | None], source: str = "") -> MetricTable[R, Part]:
    """A table of `DCGM_FI_…`; their counters have no `_total`."""
    return MetricTable("DCGM_FI_", LABELS, part, source=source)


def identity_values(gpu: Gpu, identity: Identity) -> tuple[str, ...]:
    """The values of IDENTITY."""
    index = str(gpu.index)
    model, bus_id = identity.name, identity.pci_bus_id
    return index, gpu.uuid, bus_id, f"nvidia{index}", model, identity.node, identity.driver_version


def instance_values(instances: Sequence[MigInstance]) -> dict[str, tuple[str, ...]]:
    """The values of INSTANCE by the id of the GPU instance."""
    found: dict[str, tuple[str, ...]] = {}
    for instance in instances:
        profile = PROFILE.search(instance.name)
        found[str(instance.gpu_instance)] = profile[1] if profile else "", str(instance.gpu_instance)
    return found


def holder_values(allocation: Allocation | None) -> tuple[str, ...]:
    """The values of HOLDER; where several share the GPU, each value once, with commas."""
    if allocation is None or not allocation.holders:
        return NOBODY
    found = labels_of_holders(allocation.holders)
    return tuple(found[name] for name in OUR_HOLDER)
