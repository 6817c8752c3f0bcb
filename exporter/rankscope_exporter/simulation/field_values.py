"""Fields of nvmlDeviceGetFieldValues of a simulated GPU, each as a function of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.symbols import symbol

Field = Callable[["SimulatedGpu", float], float | None]

# °C relative to the slowdown temperature, as reported by an H100.
MARGIN_THRESHOLDS = {
    pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT: -8,
    pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT: -2,
    pynvml.NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT: 0,
    pynvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT: 0,
}
REASONS = {
    pynvml.NVML_FI_DEV_PERF_POLICY_POWER: "sw_power_cap",
    pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST: "sync_boost",
    pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT: "board_limit",
    pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY: "reliability",
    269: "sw_thermal_slowdown",
    270: "hw_thermal_slowdown",
    271: "hw_power_brake_slowdown",
}
PCIE_BYTES = (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
NVLINK_KIB = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
NVLINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL,
)
# Fields of one link, since Blackwell, which has none of the above.
LINK_BYTES = (pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)
LINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
)
REMAPPING = (
    pynvml.NVML_FI_DEV_REMAPPED_COR,
    pynvml.NVML_FI_DEV_REMAPPED_UNC,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
)
RETIREMENT = (pynvml.NVML_FI_DEV_RETIRED_SBE, pynvml.NVML_FI_DEV_RETIRED_DBE, pynvml.NVML_FI_DEV_RETIRED_PENDING)


def _throttled(reason: str) -> Field:
    return lambda gpu, t: round(gpu.timeline.seconds_while(t, lambda state: reason in state.throttle) * 1e9)


def _margin(celsius: int) -> Field:
    return lambda gpu, _t: celsius if gpu.model.since("hopper") else None


def _of_all_links(value: Callable[[SimulatedGpu, float], float]) -> Field:
    """Return a field for all links, up to Hopper; Blackwell counts by link."""
    return lambda gpu, t: round(value(gpu, t)) if gpu.model.nvlinks and not gpu.model.since("blackwell") else None


def _of_one_link(value: Callable[[SimulatedGpu, float], float]) -> Field:
    return lambda gpu, t: round(value(gpu, t)) if gpu.model.nvlinks and gpu.model.since("blackwell") else None


FIELDS: dict[int, Field] = {
    pynvml.NVML_FI_DEV_MEMORY_TEMP: lambda gpu, t: round(gpu.temperature(t)) if gpu.model.since("ampere") else None,
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: lambda _gpu, _t: 0,
    pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: lambda gpu, _t: gpu.model.nvlinks or None,
    **{field: _throttled(reason) for field, reason in REASONS.items()},
    **{field: _margin(celsius) for field, celsius in MARGIN_THRESHOLDS.items()},
    **dict.fromkeys(PCIE_BYTES, lambda gpu, t: round(gpu.pcie_bytes(t)) if gpu.model.since("hopper") else None),
    **dict.fromkeys(NVLINK_KIB, _of_all_links(lambda gpu, t: gpu.nvlink_bytes(t) / 1024)),
    **dict.fromkeys(NVLINK_ERRORS, _of_all_links(lambda _gpu, _t: 0)),
    **dict.fromkeys(LINK_BYTES, _of_one_link(lambda gpu, t: gpu.nvlink_bytes(t) / gpu.model.nvlinks)),
    **dict.fromkeys(LINK_ERRORS, _of_one_link(lambda _gpu, _t: 0)),
    **dict.fromkeys(REMAPPING, lambda gpu, _t: 0 if gpu.model.since("ampere") else None),
    **dict.fromkeys(RETIREMENT, lambda gpu, _t: None if gpu.model.since("ampere") else 0),
}


@symbol("nvmlDeviceGetFieldValues")
def _field_values(gpu: SimulatedGpu, t: float, count: Any, fields: Any) -> None:
    for field in fields[: count.value]:
        value = gpu.state(t).fields.get(field.fieldId, FIELDS.get(field.fieldId, _unknown)(gpu, t))
        if value is None:
            field.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            continue
        field.nvmlReturn, field.valueType = pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG
        field.value.sllVal = round(value)


def _unknown(_gpu: SimulatedGpu, _t: float) -> None:
    return None
