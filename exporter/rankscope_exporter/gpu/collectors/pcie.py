"""The PCIe link: what it is, what it could be, and what went over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import PcieLink, pcie_bytes, pcie_link, pcie_link_max, pcie_replays


@dataclass(frozen=True)
class Pcie:
    """The link now and at best, and its counters."""

    link: PcieLink
    best: PcieLink
    replays: float | None
    bytes: Mapping[str, float | None]


class PcieReader:
    """The best that the link could be is asked once.

    nvml.h says that the counters of bytes "can be wrapped". One of 32 bits would do so each 4 GiB, several times
    between two readings, and nobody could tell how often: so a counter is believed once it was seen beyond that.
    """

    def __init__(self) -> None:
        self._best = Cached(lambda device, _: pcie_link_max(device))
        self._believed: set[str] = set()

    def __call__(self, device: Device, tick: Tick) -> Pcie:
        """The link and its counters now."""
        counts = pcie_bytes(device)
        self._believed |= {direction for direction, count in counts.items() if (count or 0) >= 2**32}
        believed = {direction: count for direction, count in counts.items() if direction in self._believed}
        return Pcie(pcie_link(device), self._best(device, tick), pcie_replays(device), believed)


GPU = GpuMetrics[Pcie](since="Fermi")
METRICS = (
    GPU.gauge(
        "pcie_link_generation",
        "Generation of the PCIe link now; an idle GPU lowers it.",
        lambda pcie: pcie.link.generation,
        source="nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    GPU.gauge(
        "pcie_link_generation_max",
        "Highest PCIe generation that this GPU can have in this slot.",
        lambda pcie: pcie.best.generation,
        source="nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    GPU.gauge(
        "pcie_link_width",
        "Lanes of the PCIe link now; fewer than the maximum is a bad contact or slot.",
        lambda pcie: pcie.link.width,
        source="nvmlDeviceGetCurrPcieLinkWidth",
    ),
    GPU.gauge(
        "pcie_link_width_max",
        "Most lanes that this GPU can have in this slot.",
        lambda pcie: pcie.best.width,
        source="nvmlDeviceGetMaxPcieLinkWidth",
    ),
    GPU.counter(
        "pcie_replays_total",
        "PCIe transfers that had to be repeated since the GPU was reset.",
        lambda pcie: pcie.replays,
        source="nvmlDeviceGetPcieReplayCounter",
        since="Kepler",
    ),
    GPU.counter(
        "pcie_bytes_total",
        "Bytes over PCIe, by direction as the GPU sees it; absent until the driver's counter has passed 4 GiB, because "
        "one of 32 bits would wrap unseen.",
        lambda pcie: pcie.bytes,
        "direction",
        source="nvmlDeviceGetFieldValues(PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES)",
        since="any, with driver 560",
    ),
)

COLLECTOR = GpuCollector("pcie", "PCIe link, replays and bytes", PcieReader, METRICS)
