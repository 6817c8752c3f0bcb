"""The PCIe link: its current and maximum speed, and its traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import PcieLink, pcie_bytes, pcie_link, pcie_link_max, pcie_replays


@dataclass(frozen=True)
class Pcie:
    """The current and the best possible link, and its counters."""

    link: PcieLink
    best: PcieLink
    replays: float | None
    bytes: Mapping[str, float | None]


class PcieReader:
    """Reader of the link. Its maximum speed is read once.

    nvml.h says that the byte counters "can be wrapped". A 32-bit counter would wrap every 4 GiB, possibly several times
    between two readings. So a counter is exported only once it has exceeded 32 bits.
    """

    def __init__(self) -> None:
        self._best = Cached(lambda device, _: pcie_link_max(device))
        self._wide: set[str] = set()  # directions whose counter has more than 32 bits

    def __call__(self, device: Device, tick: Tick) -> Pcie:
        """Return the current link and counters."""
        counts = pcie_bytes(device)
        self._wide |= {direction for direction, count in counts.items() if (count or 0) >= 2**32}
        wide = {direction: count for direction, count in counts.items() if direction in self._wide}
        return Pcie(pcie_link(device), self._best(device, tick), pcie_replays(device), wide)


GPU = GpuMetrics[Pcie](since="Fermi")
METRICS = (
    GPU.gauge(
        "pcie_link_generation",
        "Current generation of the PCIe link. An idle GPU lowers it.",
        lambda pcie: pcie.link.generation,
        source="nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    GPU.gauge(
        "pcie_link_generation_max",
        "Maximum PCIe generation of this GPU in this slot.",
        lambda pcie: pcie.best.generation,
        source="nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    GPU.gauge(
        "pcie_link_width",
        "Current number of PCIe lanes. Less than the maximum indicates a bad contact or slot.",
        lambda pcie: pcie.link.width,
        source="nvmlDeviceGetCurrPcieLinkWidth",
    ),
    GPU.gauge(
        "pcie_link_width_max",
        "Maximum number of PCIe lanes of this GPU in this slot.",
        lambda pcie: pcie.best.width,
        source="nvmlDeviceGetMaxPcieLinkWidth",
    ),
    GPU.counter(
        "pcie_replays_total",
        "PCIe retransmissions since the GPU was reset.",
        lambda pcie: pcie.replays,
        source="nvmlDeviceGetPcieReplayCounter",
        since="Kepler",
    ),
    GPU.counter(
        "pcie_bytes_total",
        "Bytes over PCIe, by direction from the GPU's view. Absent until the driver's counter exceeds 4 GiB, because a "
        "32-bit counter would wrap unnoticed.",
        lambda pcie: pcie.bytes,
        "direction",
        source="nvmlDeviceGetFieldValues(PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES)",
        since="any, with driver 560",
    ),
)

COLLECTOR = GpuCollector("pcie", "PCIe link, replays and bytes", PcieReader, METRICS)
