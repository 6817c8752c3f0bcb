"""The PCIe link: what it is, what it could be, and what went over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import PcieLink, pcie_bytes, pcie_link, pcie_link_max, pcie_replays
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, counter, gauge


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
        self._best = Seldom(lambda device, _: pcie_link_max(device))
        self._believed: set[str] = set()

    def __call__(self, device: Device, tick: Tick) -> Pcie:
        """The link now."""
        counts = pcie_bytes(device)
        self._believed |= {direction for direction, count in counts.items() if (count or 0) >= 2**32}
        believed = {direction: count for direction, count in counts.items() if direction in self._believed}
        return Pcie(pcie_link(device), self._best(device, tick), pcie_replays(device), believed)


METRICS: tuple[GpuMetric[Pcie], ...] = (
    gauge(
        "pcie_link_generation",
        "Generation of the PCIe link now; an idle GPU lowers it.",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        lambda pcie: pcie.link.generation,
        since="Fermi",
    ),
    gauge(
        "pcie_link_generation_max",
        "Highest PCIe generation that this GPU can have in this slot.",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        lambda pcie: pcie.best.generation,
        since="Fermi",
    ),
    gauge(
        "pcie_link_width",
        "Lanes of the PCIe link now; fewer than the maximum is a bad contact or slot.",
        "nvmlDeviceGetCurrPcieLinkWidth",
        lambda pcie: pcie.link.width,
        since="Fermi",
    ),
    gauge(
        "pcie_link_width_max",
        "Most lanes that this GPU can have in this slot.",
        "nvmlDeviceGetMaxPcieLinkWidth",
        lambda pcie: pcie.best.width,
        since="Fermi",
    ),
    counter(
        "pcie_replays_total",
        "PCIe transfers that had to be repeated since the GPU was reset.",
        "nvmlDeviceGetPcieReplayCounter",
        lambda pcie: pcie.replays,
        since="Kepler",
    ),
    counter(
        "pcie_bytes_total",
        "Bytes over PCIe, by direction as the GPU sees it; absent until the driver's counter has passed 4 GiB, because "
        "one of 32 bits would wrap unseen.",
        "nvmlDeviceGetFieldValues(PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES)",
        lambda pcie: pcie.bytes,
        labels=("direction",),
        since="any, with driver 560",
    ),
)

SOURCE = GpuSource("pcie", "PCIe link, replays and bytes", PcieReader, METRICS)
