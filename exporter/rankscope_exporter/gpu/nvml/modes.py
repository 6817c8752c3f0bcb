"""A GPU's modes as text; empty if the driver does not report one."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple
from uuid import UUID

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import ask, perform

_SWITCH = {pynvml.NVML_FEATURE_DISABLED: "disabled", pynvml.NVML_FEATURE_ENABLED: "enabled"}
_COMPUTE = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive_thread",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
}
_VIRTUALIZATION = {
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE: "none",
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH: "passthrough",
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU: "vgpu",
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU: "host_vgpu",
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA: "host_vsga",
}
_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "none",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "gpu_reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "node_reboot",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain_p2p",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain_and_reset",
    5: "recover_imex_domain",  # numbers, because bindings before 13.590 have no names for these
    6: "bus_reset",
    7: "system_reboot",
}
_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not_started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in_progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}


class Modes(NamedTuple):
    """Modes that an administrator sets, as text."""

    persistence: str
    compute: str
    virtualization: str
    mig: str
    ecc: str


class Fabric(NamedTuple):
    """A GPU's registration with an NVSwitch fabric. NVLink is unusable until `state` is completed."""

    state: str
    status: str
    """`success`, or the return code of the failed probe."""
    cluster_uuid: str
    clique: str


def modes(device: Device) -> Modes:
    """Return the current modes; empty if the device has no such mode."""
    return Modes(
        persistence=_word(_SWITCH, ask(pynvml.nvmlDeviceGetPersistenceMode, device.handle)),
        compute=_word(_COMPUTE, ask(pynvml.nvmlDeviceGetComputeMode, device.handle)),
        virtualization=_word(_VIRTUALIZATION, ask(pynvml.nvmlDeviceGetVirtualizationMode, device.handle)),
        mig=_word(_SWITCH, _first(ask(pynvml.nvmlDeviceGetMigMode, device.handle))),
        ecc=_word(_SWITCH, _first(ask(pynvml.nvmlDeviceGetEccMode, device.handle))),
    )


def recovery_action(device: Device) -> str | None:
    """Return the driver's recommended action to recover the GPU."""
    action = device.fields(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)[0]
    return None if action is None else _word(_RECOVERY, int(action))


def fabric(device: Device) -> Fabric | None:
    """Return the current registration; None if there is no fabric."""
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()  # drivers with newer versions still accept version 2
    if not perform(pynvml.nvmlDeviceGetGpuFabricInfoV, device.handle, ctypes.byref(info)):
        return None
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return Fabric(
        state=_word(_FABRIC_STATES, info.state),
        status="success" if info.status == pynvml.NVML_SUCCESS else str(info.status),
        cluster_uuid=str(UUID(bytes=bytes(info.clusterUuid))),
        clique=str(info.cliqueId),
    )


def _first(answer: Any) -> Any:
    """Return the current mode from a pair of current and pending mode."""
    return None if answer is None else answer[0]


def _word(words: dict[int, str], value: int | None) -> str:
    """Return the word for a value, or its number if this version does not know it."""
    return "" if value is None else words.get(value, str(value))
