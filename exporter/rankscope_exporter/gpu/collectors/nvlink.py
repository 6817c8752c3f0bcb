"""NVLinks: how many are up, what went over them, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import nvlink_bytes, nvlink_errors, nvlink_states
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, counter, gauge

STATES_EVERY = 5.0  # seconds: up to 18 calls a GPU; as errors, and sooner than what waits for the link is told
ERRORS_EVERY = 5.0  # seconds: on Blackwell 144 fields a GPU


@dataclass(frozen=True)
class NvLink:
    """Of all links of a GPU."""

    states: Sequence[bool]
    bytes: Mapping[str, float | None]
    errors: Mapping[str, float | None]


class NvLinkReader:
    """Bytes are read each time, the rest less often."""

    def __init__(self) -> None:
        self._states = Seldom(lambda device, _: nvlink_states(device), STATES_EVERY)
        self._errors = Seldom(self._read_errors, ERRORS_EVERY)

    def __call__(self, device: Device, tick: Tick) -> NvLink | None:
        """None where there is no NVLink."""
        states = self._states(device, tick)
        if not states:
            return None
        return NvLink(states, nvlink_bytes(device, len(states)), self._errors(device, tick))

    def _read_errors(self, device: Device, tick: Tick) -> Mapping[str, float | None]:
        return nvlink_errors(device, len(self._states(device, tick)))


METRICS: tuple[GpuMetric[NvLink], ...] = (
    gauge(
        "nvlink_links",
        "NVLinks of the GPU.",
        "nvmlDeviceGetFieldValues(NVLINK_LINK_COUNT)",
        lambda nvlink: len(nvlink.states),
        since="Pascal",
    ),
    gauge(
        "nvlink_links_active",
        "NVLinks that are up.",
        "nvmlDeviceGetNvLinkState",
        lambda nvlink: sum(nvlink.states),
        since="Pascal",
    ),
    counter(
        "nvlink_bytes_total",
        "Payload over all NVLinks, by direction as the GPU sees it.",
        "nvmlDeviceGetFieldValues(NVLINK_THROUGHPUT_DATA_…), since Blackwell (NVLINK_COUNT_…_BYTES)",
        lambda nvlink: nvlink.bytes,
        labels=("direction",),
        since="Volta",
    ),
    counter(
        "nvlink_errors_total",
        "Errors of all NVLinks, by kind; to Hopper `crc_flit`, `crc_data`, `replay`, `recovery`, `ecc_data`, since "
        "Blackwell others.",
        "nvmlDeviceGetFieldValues(NVLINK_…_ERROR_COUNT_TOTAL), since Blackwell (NVLINK_COUNT_…)",
        lambda nvlink: nvlink.errors,
        labels=("kind",),
        since="Pascal",
    ),
)

SOURCE = GpuSource("nvlink", "NVLinks up, bytes and errors", NvLinkReader, METRICS)
