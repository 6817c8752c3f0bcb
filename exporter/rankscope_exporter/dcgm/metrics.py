"""dcgm-exporter's default counters: name, type and unit as there, and the value from what our sources have read.

The list is etc/default-counters.csv of NVIDIA/dcgm-exporter, as its METRICS.md has it in 2026; docs/dcgm.md says what
of it is missing, and what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rankscope_exporter.dcgm.labels import LABELS
from rankscope_exporter.dcgm.recent import WINDOW, Amounts
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.gpu.collectors import clocks, ecc, gpm, load, memory, nvlink, pcie, power, temperature
from rankscope_exporter.gpu.nvml.device import Memory
from rankscope_exporter.gpu.source import GpuSource

R = TypeVar("R")
Number = float | None
Kind = Literal["gauge", "counter"]

WHOLE_GPU = gpm.WHOLE_GPU
MEGA, MIB = 1e6, 2**20
# What DCGM calls a MB of NVLink traffic: it divides KiB by 1000 (NVIDIA/dcgm-exporter, pull request 658).
NVLINK_MB = 1024 * 1000

ByInstance = Mapping[str, Number]
"""Values by the id of the GPU instance; WHOLE_GPU where the value is that of all."""
Framebuffers = Mapping[str, Memory]
"""The memory of each GPU instance, or of the whole GPU if it is not split."""


@dataclass(frozen=True)
class DcgmMetric(Declaration):
    """One of dcgm-exporter's, and how its values come out of what one of our collectors has of a GPU."""

    collector: str = field(kw_only=True)
    """Without that collector the metric is absent."""
    value: Callable[[Any], ByInstance] = field(kw_only=True)


def _metric(name: str, kind: Kind, text: str, source: GpuSource[Any], value: Callable[[Any], ByInstance]) -> DcgmMetric:
    return DcgmMetric(kind, f"DCGM_FI_{name}", text, LABELS, collector=source.name, value=value)


def _last(name: str, kind: Kind, text: str, source: GpuSource[R], value: Callable[[R], Number]) -> DcgmMetric:
    """Of the source's last reading."""
    return _metric(name, kind, text, source, lambda reading: {WHOLE_GPU: value(reading)})


def _framebuffer(name: str, text: str, size: Callable[[Memory], int | None]) -> DcgmMetric:
    def value(framebuffers: Framebuffers) -> ByInstance:
        sizes = {instance: size(framebuffer) for instance, framebuffer in framebuffers.items()}
        return {instance: None if size is None else size / MIB for instance, size in sizes.items()}

    return _metric(name, "gauge", text, memory.SOURCE, value)


def _average(
    name: str, text: str, source: GpuSource[Any], quantity: str, factor: float = 1.0, most: float = math.inf
) -> DcgmMetric:
    """Of the source's counter over the last seconds. `most`, because the driver's samples end when they like."""
    text = f"{text.removesuffix('.')}, averaged over {WINDOW:.0f} s."

    def value(rates: Amounts) -> ByInstance:
        return {instance: min(most, factor * rate) for (instance, what), rate in rates.items() if what == quantity}

    return _metric(name, "gauge", text, source, value)


def load_counts(loads: load.Loads) -> Amounts:
    """Busy seconds by engine."""
    return {(WHOLE_GPU, engine): now.busy_seconds for engine, now in loads.items() if now}


def gpm_counts(totals: gpm.Totals) -> Amounts:
    """Seconds and bytes by instance."""
    return {(instance, name): count for instance, counts in totals.items() for name, count in counts.items()}


def nvlink_counts(links: nvlink.NvLink) -> Amounts:
    """Payload of both directions, if both are known: a sum that lost one for a moment would jump."""
    sizes = [size for size in links.bytes.values() if size is not None]
    return {(WHOLE_GPU, "payload"): sum(sizes)} if len(sizes) == len(links.bytes) else {}


COUNTS: Mapping[str, Callable[[Any], Amounts]] = {
    load.SOURCE.name: load_counts,
    gpm.SOURCE.name: gpm_counts,
    nvlink.SOURCE.name: nvlink_counts,
}
"""What is averaged, by collector."""

METRICS: tuple[DcgmMetric, ...] = (
    _last("DEV_SM_CLOCK", "gauge", "SM clock, MHz.", clocks.SOURCE, lambda c: _mhz(c, "sm")),
    _last("DEV_MEM_CLOCK", "gauge", "Memory clock, MHz.", clocks.SOURCE, lambda c: _mhz(c, "memory")),
    _last("DEV_MEMORY_TEMP", "gauge", "Memory temperature, C.", temperature.SOURCE, lambda t: t.memory),
    _last("DEV_GPU_TEMP", "gauge", "GPU temperature, C.", temperature.SOURCE, lambda t: t.gpu),
    _last("DEV_POWER_USAGE", "gauge", "Power draw, W.", power.SOURCE, lambda p: p.watts),
    _last(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "counter",
        "Energy used since the driver was loaded, mJ.",
        power.SOURCE,
        lambda p: _scaled(p.joules, 1000),
    ),
    _last("DEV_PCIE_REPLAY_COUNTER", "counter", "PCIe retries.", pcie.SOURCE, lambda p: p.replays),
    _average("DEV_GPU_UTIL", "GPU utilisation, %.", load.SOURCE, "gpu", 100, 100),
    _average("DEV_MEM_COPY_UTIL", "Memory utilisation, %.", load.SOURCE, "memory", 100, 100),
    _average("DEV_ENC_UTIL", "Encoder utilisation, %.", load.SOURCE, "encoder", 100, 100),
    _average("DEV_DEC_UTIL", "Decoder utilisation, %.", load.SOURCE, "decoder", 100, 100),
    _framebuffer("DEV_FB_FREE", "Free memory, MiB.", lambda framebuffer: framebuffer.free),
    _framebuffer("DEV_FB_USED", "Used memory, MiB.", lambda framebuffer: framebuffer.used),
    _framebuffer("DEV_FB_RESERVED", "Memory that the driver reserves, MiB.", lambda framebuffer: framebuffer.reserved),
    _average(
        "DEV_NVLINK_BANDWIDTH_TOTAL",
        "NVLink payload, both directions of all links, MB/s (DCGM's, 1,024,000 bytes).",
        nvlink.SOURCE,
        "payload",
        1 / NVLINK_MB,
    ),
    _last(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped for uncorrectable errors.",
        ecc.SOURCE,
        lambda e: e.repairs.remapped_rows["uncorrected"],
    ),
    _last(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped for correctable errors.",
        ecc.SOURCE,
        lambda e: e.repairs.remapped_rows["corrected"],
    ),
    _last(
        "DEV_ROW_REMAP_FAILURE",
        "gauge",
        "1 if remapping a row has failed.",
        ecc.SOURCE,
        lambda e: e.repairs.remapping_failed,
    ),
    _average("PROF_GR_ENGINE_ACTIVE", "Graphics engine active, share of time.", gpm.SOURCE, "graphics"),
    _average("PROF_PIPE_TENSOR_ACTIVE", "Tensor pipe active, ratio.", gpm.SOURCE, "tensor"),
    _average("PROF_DRAM_ACTIVE", "Memory interface active, ratio.", gpm.SOURCE, "dram"),
    _average("PROF_PCIE_TX_BYTES", "PCIe transmitted, bytes/s.", gpm.SOURCE, "pcie_transmit"),
    _average("PROF_PCIE_RX_BYTES", "PCIe received, bytes/s.", gpm.SOURCE, "pcie_receive"),
)


def _mhz(now: clocks.Clocks, domain: str) -> Number:
    return _scaled(now.hertz[domain], 1 / MEGA)


def _scaled(value: Number, factor: float) -> Number:
    return None if value is None else value * factor
