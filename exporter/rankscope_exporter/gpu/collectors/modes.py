"""How each GPU is set up, what the driver wants done to it, and its registration with the NVSwitch fabric."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.modes import Fabric, Modes, fabric, modes, recovery_action

EVERY = 10.0  # seconds: an administrator sets these


@dataclass(frozen=True)
class Setup:
    """How a GPU is set up, in words; None where it does not say."""

    modes: Modes
    recovery_action: str | None
    fabric: Fabric | None


def read(device: Device, _tick: Tick) -> Setup:
    """Three groups of calls, each for what the device has of it."""
    return Setup(modes(device), recovery_action(device), fabric(device))


GPU = GpuMetrics[Setup]()
METRICS = (
    GPU.gauge(
        "modes_info",
        "Persistence, compute mode, virtualization (vGPU), MIG and ECC as they are set; empty where there is no such.",
        lambda setup: {astuple(setup.modes): 1} if any(astuple(setup.modes)) else None,
        *(field.name for field in fields(Modes)),
        source="nvmlDeviceGetPersistenceMode, …ComputeMode, …VirtualizationMode, …MigMode, …EccMode",
    ),
    GPU.gauge(
        "recovery_action_info",
        "What the driver wants done so that the GPU works again: `none`, `gpu_reset`, `node_reboot`, `drain_p2p`, "
        "`drain_and_reset`, ….",
        lambda setup: {setup.recovery_action: 1} if setup.recovery_action else None,
        "action",
        source="nvmlDeviceGetFieldValues(GET_GPU_RECOVERY_ACTION)",
        since="any, with driver 570",
    ),
    GPU.gauge(
        "fabric_info",
        "Registration with the NVSwitch fabric; NVLink works once `state` is `completed` and `status` `success`.",
        lambda setup: {astuple(setup.fabric): 1} if setup.fabric else None,
        *(field.name for field in fields(Fabric)),
        source="nvmlDeviceGetGpuFabricInfoV",
        since="Hopper",
    ),
)

COLLECTOR = GpuCollector("modes", "modes, recovery action, fabric state", lambda: Cached(read, EVERY), METRICS)
