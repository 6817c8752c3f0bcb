"""NVLinks: active links, bytes and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Reader, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import nvlink_bytes, nvlink_errors, nvlink_states

STATES_EVERY = 5.0  # seconds: up to 18 calls per GPU; fast enough to show the cause before a slow rank alerts
ERRORS_EVERY = 5.0  # seconds: 144 fields per GPU on Blackwell


@dataclass(frozen=True)
class NvLink:
    """States, bytes and errors of all links of a GPU."""

    states: Sequence[bool]
    bytes: Mapping[str, float | None]
    errors: Mapping[str, float | None]


def reader() -> Reader[NvLink]:
    """Return a reader of the links: bytes every time, states and errors less often. There may be no NVLink."""
    states = Cached(lambda device, _: nvlink_states(device), STATES_EVERY)
    errors = Cached(lambda device, tick: nvlink_errors(device, len(states(device, tick))), ERRORS_EVERY)

    def read(device: Device, tick: Tick) -> NvLink | None:
        links = states(device, tick)
        return NvLink(links, nvlink_bytes(device, len(links)), errors(device, tick)) if links else None

    return read


GPU = GpuMetrics[NvLink](since="Pascal")
METRICS = (
    GPU.gauge(
        "nvlink_links",
        "Number of NVLinks of the GPU.",
        lambda nvlink: len(nvlink.states),
        source="nvmlDeviceGetFieldValues(NVLINK_LINK_COUNT)",
    ),
    GPU.gauge(
        "nvlink_links_active",
        "Number of NVLinks that are up.",
        lambda nvlink: sum(nvlink.states),
        source="nvmlDeviceGetNvLinkState",
    ),
    GPU.counter(
        "nvlink_bytes_total",
        "Payload over all NVLinks, by direction from the GPU's view.",
        lambda nvlink: nvlink.bytes,
        "direction",
        source="nvmlDeviceGetFieldValues(NVLINK_THROUGHPUT_DATA_…), since Blackwell (NVLINK_COUNT_…_BYTES)",
        since="Volta",
    ),
    GPU.counter(
        "nvlink_errors_total",
        "Errors of all NVLinks, by kind: `crc_flit`, `crc_data`, `replay`, `recovery`, `ecc_data` up to Hopper, others "
        "since Blackwell.",
        lambda nvlink: nvlink.errors,
        "kind",
        source="nvmlDeviceGetFieldValues(NVLINK_…_ERROR_COUNT_TOTAL), since Blackwell (NVLINK_COUNT_…)",
    ),
)

COLLECTOR = GpuCollector("nvlink", "NVLinks up, bytes and errors", reader, METRICS)
