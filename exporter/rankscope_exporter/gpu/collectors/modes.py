"""How each GPU is set up, what the driver wants done to it, and its place in the NVSwitch fabric."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.modes import Fabric, Modes, fabric, modes, recovery_action
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, gauge

EVERY = 10.0  # seconds: an administrator sets these


@dataclass(frozen=True)
class Setup:
    """In words."""

    modes: Modes
    recovery_action: str | None
    fabric: Fabric | None


def read(device: Device, _tick: Tick) -> Setup:
    """All of it now."""
    return Setup(modes(device), recovery_action(device), fabric(device))


METRICS: tuple[GpuMetric[Setup], ...] = (
    gauge(
        "modes_info",
        "Persistence, compute mode, virtualisation (vGPU), MIG and ECC as they are set; empty where there is no such.",
        "nvmlDeviceGetPersistenceMode, …ComputeMode, …VirtualizationMode, …MigMode, …EccMode",
        lambda setup: {astuple(setup.modes): 1} if any(astuple(setup.modes)) else None,
        labels=tuple(field.name for field in fields(Modes)),
    ),
    gauge(
        "recovery_action_info",
        "What the driver wants done so that the GPU works again: `none`, `gpu_reset`, `node_reboot`, `drain_p2p`, "
        "`drain_and_reset`, ….",
        "nvmlDeviceGetFieldValues(GET_GPU_RECOVERY_ACTION)",
        lambda setup: {setup.recovery_action: 1} if setup.recovery_action else None,
        labels=("action",),
        since="any, with driver 570",
    ),
    gauge(
        "fabric_info",
        "Registration with the NVSwitch fabric; NVLink works once `state` is `completed` and `status` `success`.",
        "nvmlDeviceGetGpuFabricInfoV",
        lambda setup: {astuple(setup.fabric): 1} if setup.fabric else None,
        labels=tuple(field.name for field in fields(Fabric)),
        since="Hopper",
    ),
)

SOURCE = GpuSource("modes", "modes, recovery action, fabric state", lambda: Seldom(read, EVERY), METRICS)
