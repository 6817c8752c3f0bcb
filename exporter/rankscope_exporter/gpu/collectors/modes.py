"""Configured modes of each GPU, the driver's recommended recovery action, and the NVSwitch fabric registration."""

from __future__ import annotations

from typing import NamedTuple

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.modes import Fabric, Modes, fabric, modes, recovery_action

EVERY = 10.0  # seconds: administrators change these rarely


class Setup(NamedTuple):
    """A GPU's modes as text; None if the device does not report them."""

    modes: Modes
    recovery_action: str | None
    fabric: Fabric | None


def read(device: Device, _tick: Tick) -> Setup:
    """Read modes, recovery action and fabric registration."""
    return Setup(modes(device), recovery_action(device), fabric(device))


GPU = GpuMetrics[Setup]()
METRICS = (
    GPU.gauge(
        "modes_info",
        "Configured persistence, compute, virtualization (vGPU), MIG and ECC modes; empty if the GPU has no such mode.",
        lambda setup: {setup.modes: 1} if any(setup.modes) else None,
        *Modes._fields,
        source="nvmlDeviceGetPersistenceMode, …ComputeMode, …VirtualizationMode, …MigMode, …EccMode",
    ),
    GPU.gauge(
        "recovery_action_info",
        "The driver's recommended action to recover the GPU: `none`, `gpu_reset`, `node_reboot`, `drain_p2p`, "
        "`drain_and_reset`, ….",
        lambda setup: {setup.recovery_action: 1} if setup.recovery_action else None,
        "action",
        source="nvmlDeviceGetFieldValues(GET_GPU_RECOVERY_ACTION)",
        since="any, with driver 570",
    ),
    GPU.gauge(
        "fabric_info",
        "Registration with the NVSwitch fabric. NVLink works when `state` is `completed` and `status` is `success`.",
        lambda setup: {setup.fabric: 1} if setup.fabric else None,
        *Fabric._fields,
        source="nvmlDeviceGetGpuFabricInfoV",
        since="Hopper",
    ),
)

COLLECTOR = GpuCollector("modes", "modes, recovery action, fabric state", lambda: Cached(read, EVERY), METRICS)
