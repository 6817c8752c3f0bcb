"""dcgm-exporter's labels of a GPU: identity, MIG instance and holder."""

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

# The order of dcgm-exporter's template (internal/pkg/rendermetrics). Prometheus treats an empty label as absent.
IDENTITY = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION")
INSTANCE = ("GPU_I_PROFILE", "GPU_I_ID")
HOLDER = ("hpc_job", "container", "namespace", "pod")
LABELS = (*IDENTITY, *INSTANCE, *HOLDER)

# The labels of rankscope_gpu_allocation_info that correspond to HOLDER.
ALLOCATION_LABELS = ("slurm_job_id", "k8s_container", "k8s_namespace", "k8s_pod")
NO_INSTANCE = ("",) * len(INSTANCE)
NO_HOLDER = ("",) * len(HOLDER)

# NVML names a MIG device "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb". The profile of its GPU instance is the last part
# without the compute instance (`1c.`).
PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)$")


def dcgm_metrics(part: Callable[[R], Part | None], source: str = "") -> MetricTable[R, Part]:
    """Return a table of `DCGM_FI_…` metrics, whose counters have no `_total`."""
    return MetricTable("DCGM_FI_", LABELS, part, source=source)


def identity_values(gpu: Gpu, identity: Identity) -> tuple[str, ...]:
    """Return the values of IDENTITY."""
    index = str(gpu.index)
    model, bus_id = identity.name, identity.pci_bus_id
    return index, gpu.uuid, bus_id, f"nvidia{index}", model, identity.node, identity.driver_version


def instance_values(instances: Sequence[MigInstance]) -> dict[str, tuple[str, ...]]:
    """Return the values of INSTANCE by the id of the GPU instance."""
    found: dict[str, tuple[str, ...]] = {}
    for instance in instances:
        profile = PROFILE.search(instance.name)
        found[str(instance.gpu_instance)] = profile[1] if profile else "", str(instance.gpu_instance)
    return found


def holder_values(allocation: Allocation | None) -> tuple[str, ...]:
    """Return the values of HOLDER. If several holders share the GPU, each value appears once, separated by commas."""
    if allocation is None or not allocation.holders:
        return NO_HOLDER
    found = labels_of_holders(allocation.holders)
    return tuple(found[name] for name in ALLOCATION_LABELS)
