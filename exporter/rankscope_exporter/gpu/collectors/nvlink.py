"""NVLinks: how many are up, what went over them, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import nvlink_bytes, nvlink_errors, nvlink_states

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
        self._states = Cached(lambda device, _: nvlink_states(device), STATES_EVERY)
        self._errors = Cached(self._read_errors, ERRORS_EVERY)

    def __call__(self, device: Device, tick: Tick) -> NvLink | None:
        """Links, bytes and errors; None where there is no NVLink."""
        states = self._states(device, tick)
        if not states:
            return None
        return NvLink(states, nvlink_bytes(device, len(states)), self._errors(device, tick))

    def _read_errors(self, device: Device, tick: Tick) -> Mapping[str, float | None]:
        return nvlink_errors(device, len(self._states(device, tick)))


GPU = GpuMetrics[NvLink](since="Pascal")
METRICS = (
    GPU.gauge(
        "nvlink_links",
        "NVLinks of the GPU.",
        lambda nvlink: len(nvlink.states),
        source="nvmlDeviceGetFieldValues(NVLINK_LINK_COUNT)",
    ),
    GPU.gauge(
        "nvlink_links_active",
        "NVLinks that are up.",
        lambda nvlink: sum(nvlink.states),
        source="nvmlDeviceGetNvLinkState",
    ),
    GPU.counter(
        "nvlink_bytes_total",
        "Payload over all NVLinks, by direction as the GPU sees it.",
        lambda nvlink: nvlink.bytes,
        "direction",
        source="nvmlDeviceGetFieldValues(NVLINK_THROUGHPUT_DATA_…), since Blackwell (NVLINK_COUNT_…_BYTES)",
        since="Volta",
    ),
    GPU.counter(
        "nvlink_errors_total",
        "Errors of all NVLinks, by kind; to Hopper `crc_flit`, `crc_data`, `replay`, `recovery`, `ecc_data`, since "
        "Blackwell others.",
        lambda nvlink: nvlink.errors,
        "kind",
        source="nvmlDeviceGetFieldValues(NVLINK_…_ERROR_COUNT_TOTAL), since Blackwell (NVLINK_COUNT_…)",
    ),
)

COLLECTOR = GpuCollector("nvlink", "NVLinks up, bytes and errors", NvLinkReader, METRICS)
