"""A GPU's links: PCIe and NVLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DriverError, ask
from rankscope_exporter.gpu.nvml.fields import ALL_LINKS

DIRECTIONS = ("transmit", "receive")
_PCIE_BYTES = (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
# Cumulative payload of all links in KiB (nvml.h). Blackwell has bytes per link instead.
_NVLINK_KIB = (
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
)
_NVLINK_BYTES = (pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)
# Totals over all links, up to Hopper.
_NVLINK_ERRORS = {
    "crc_flit": pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "crc_data": pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    "replay": pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    "ecc_data": pynvml.NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL,
}
# Fields of each link, since Blackwell.
_NVLINK_5_ERRORS = {
    "malformed_packet": pynvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    "buffer_overrun": pynvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    "receive": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    "local_integrity": pynvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
    "transmit_discard": pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS,
    "recovery_success": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
    "recovery_failure": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    "symbol": pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
}


@dataclass(frozen=True)
class PcieLink:
    """Generation (1, 2, …) and number of lanes of a PCIe link."""

    generation: float | None
    width: float | None


def pcie_link(device: Device) -> PcieLink:
    """Return the current link. An idle GPU lowers the generation."""
    generation = ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, device.handle)
    return PcieLink(generation, ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, device.handle))


def pcie_link_max(device: Device) -> PcieLink:
    """Return the best link of this GPU in this slot."""
    generation = ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, device.handle)
    return PcieLink(generation, ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, device.handle))


def pcie_replays(device: Device) -> float | None:
    """Return the number of retransmissions since the GPU was reset."""
    replays: int | None = ask(pynvml.nvmlDeviceGetPcieReplayCounter, device.handle)
    return replays


def pcie_bytes(device: Device) -> dict[str, float | None]:
    """Return cumulative bytes over PCIe by direction; None for a direction that the device does not count."""
    return dict(zip(DIRECTIONS, device.fields(*_PCIE_BYTES), strict=True))


def pcie_throughput(device: Device) -> dict[str, float | None]:
    """Return bytes per second by direction. Each of the two calls measures and blocks for 20 ms."""
    counters = (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    rates = [ask(pynvml.nvmlDeviceGetPcieThroughput, device.handle, counter) for counter in counters]
    return {
        direction: None if rate is None else rate * 1000.0 for direction, rate in zip(DIRECTIONS, rates, strict=True)
    }


def nvlink_states(device: Device) -> list[bool]:
    """Return whether each NVLink is up; empty if there is none."""
    count = device.fields(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)[0]
    answers = [_nvlink_state(device, link) for link in range(int(count or 0))]
    return [bool(answer) for answer in answers if answer is not None]


def nvlink_bytes(device: Device, links: int) -> dict[str, float | None]:
    """Return the cumulative payload of all links in bytes, by direction."""
    kib = device.fields(*_NVLINK_KIB)
    if any(value is not None for value in kib):
        return {d: None if value is None else value * 1024 for d, value in zip(DIRECTIONS, kib, strict=True)}
    return _sums(device, dict(zip(DIRECTIONS, _NVLINK_BYTES, strict=True)), links)


def nvlink_errors(device: Device, links: int) -> dict[str, float | None]:
    """Return the errors since the GPU was reset, by kind. Kinds differ between architectures."""
    totals = dict(zip(_NVLINK_ERRORS, device.fields(*_NVLINK_ERRORS.values()), strict=True))
    if any(value is not None for value in totals.values()):
        return totals
    return _sums(device, _NVLINK_5_ERRORS, links)


def _sums(device: Device, fields: Mapping[str, int], links: int) -> dict[str, float | None]:
    """Return each field's sum over the links; None unless all report it, since a partial sum is not a counter."""
    values = device.fields(*((field, link) for field in fields.values() for link in range(links)))
    return {
        name: _sum(values[index * links : (index + 1) * links]) if links else None for index, name in enumerate(fields)
    }


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _nvlink_state(device: Device, link: int) -> Any:
    try:
        return ask(pynvml.nvmlDeviceGetNvLinkState, device.handle, link)
    except DriverError as error:
        if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # the board does not have this link
            return None
        raise
