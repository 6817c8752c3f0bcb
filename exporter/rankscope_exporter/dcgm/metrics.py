"""dcgm-exporter's default counters: same name, type and unit, computed from our collectors' readings.

The list is etc/default-counters.csv of NVIDIA/dcgm-exporter, as documented in its METRICS.md in 2026. docs/dcgm.md
lists the missing metrics and the differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rankscope_exporter.dcgm.labels import dcgm_metrics
from rankscope_exporter.dcgm.recent import WINDOW, Amounts
from rankscope_exporter.exposition.metric import MetricTable
from rankscope_exporter.gpu.collector import GpuCollector
from rankscope_exporter.gpu.collectors import clocks, ecc, gpm, load, memory, nvlink, pcie, power, temperature
from rankscope_exporter.gpu.nvml.device import Memory

Number = float | None

WHOLE_GPU = gpm.WHOLE_GPU
MEGA, MIB = 1e6, 2**20
# DCGM's MB of NVLink traffic: it divides KiB by 1000 (NVIDIA/dcgm-exporter, pull request 658).
NVLINK_MB = 1024 * 1000

CollectorReadings = dict[str, Any]
"""The readings of one GPU by collector. A missing reading has no entry."""
ByInstance = Mapping[str, Number]
"""Values by the id of the GPU instance; WHOLE_GPU, or a single number, for the whole GPU."""
Framebuffers = Mapping[str, Memory]
"""The memory of each GPU instance, or of the whole GPU if it is not split."""


def _table(collector: GpuCollector[Any]) -> MetricTable[CollectorReadings, Any]:
    """Return the table of metrics read from one of our collectors. They are absent without it (`source`)."""
    return dcgm_metrics(lambda readings: readings.get(collector.name), source=collector.name)


def _framebuffer(size: Callable[[Memory], int | None]) -> Callable[[Framebuffers], ByInstance]:
    """Return a function that converts one size to MiB by instance; None if the size is unknown."""

    def values(framebuffers: Framebuffers) -> ByInstance:
        sizes = {instance: size(framebuffer) for instance, framebuffer in framebuffers.items()}
        return {instance: None if size is None else size / MIB for instance, size in sizes.items()}

    return values


def _rate(quantity: str, factor: float = 1.0, maximum: float = math.inf) -> Callable[[Amounts], ByInstance]:
    """Return a function that selects the average increase per second. `maximum` caps overlapping driver samples."""
    return lambda rates: {
        instance: min(maximum, factor * rate) for (instance, name), rate in rates.items() if name == quantity
    }


def _averaged(text: str) -> str:
    return f"{text}, averaged over {WINDOW:.0f} s."


def load_counts(loads: load.Loads) -> Amounts:
    """Return busy seconds by engine."""
    return {(WHOLE_GPU, engine): now.busy_seconds for engine, now in loads.items() if now}


def gpm_counts(totals: gpm.Totals) -> Amounts:
    """Return seconds and bytes by instance."""
    return {(instance, name): count for instance, counts in totals.items() for name, count in counts.items()}


def nvlink_counts(links: nvlink.NvLink) -> Amounts:
    """Return the payload of both directions if both are known: the sum would jump if one were missing for a moment."""
    sizes = [size for size in links.bytes.values() if size is not None]
    return {(WHOLE_GPU, "payload"): sum(sizes)} if len(sizes) == len(links.bytes) else {}


COUNTS: Mapping[str, Callable[[Any], Amounts]] = {
    load.COLLECTOR.name: load_counts,
    gpm.COLLECTOR.name: gpm_counts,
    nvlink.COLLECTOR.name: nvlink_counts,
}
"""Functions that extract the counters to average, by collector."""

CLOCKS = _table(clocks.COLLECTOR)
TEMPERATURE = _table(temperature.COLLECTOR)
POWER = _table(power.COLLECTOR)
PCIE = _table(pcie.COLLECTOR)
LOAD = _table(load.COLLECTOR)
MEMORY = _table(memory.COLLECTOR)
NVLINK = _table(nvlink.COLLECTOR)
ECC = _table(ecc.COLLECTOR)
GPM = _table(gpm.COLLECTOR)

METRICS = (
    CLOCKS.gauge("DEV_SM_CLOCK", "SM clock, MHz.", lambda c: _mhz(c, "sm")),
    CLOCKS.gauge("DEV_MEM_CLOCK", "Memory clock, MHz.", lambda c: _mhz(c, "memory")),
    TEMPERATURE.gauge("DEV_MEMORY_TEMP", "Memory temperature, C.", lambda t: t.memory),
    TEMPERATURE.gauge("DEV_GPU_TEMP", "GPU temperature, C.", lambda t: t.gpu),
    POWER.gauge("DEV_POWER_USAGE", "Power draw, W.", lambda p: p.watts),
    POWER.counter(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy used since the driver was loaded, mJ.",
        lambda p: _scaled(p.joules, 1000),
    ),
    PCIE.counter("DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", lambda p: p.replays),
    LOAD.gauge("DEV_GPU_UTIL", _averaged("GPU utilization, %"), _rate("gpu", 100, 100)),
    LOAD.gauge("DEV_MEM_COPY_UTIL", _averaged("Memory utilization, %"), _rate("memory", 100, 100)),
    LOAD.gauge("DEV_ENC_UTIL", _averaged("Encoder utilization, %"), _rate("encoder", 100, 100)),
    LOAD.gauge("DEV_DEC_UTIL", _averaged("Decoder utilization, %"), _rate("decoder", 100, 100)),
    MEMORY.gauge("DEV_FB_FREE", "Free memory, MiB.", _framebuffer(lambda memory: memory.free)),
    MEMORY.gauge("DEV_FB_USED", "Used memory, MiB.", _framebuffer(lambda memory: memory.used)),
    MEMORY.gauge(
        "DEV_FB_RESERVED", "Memory that the driver reserves, MiB.", _framebuffer(lambda memory: memory.reserved)
    ),
    NVLINK.gauge(
        "DEV_NVLINK_BANDWIDTH_TOTAL",
        _averaged("NVLink payload, both directions of all links, MB/s (DCGM's, 1,024,000 bytes)"),
        _rate("payload", 1 / NVLINK_MB),
    ),
    ECC.counter(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for uncorrectable errors.",
        lambda e: e.repairs.remapped_rows["uncorrected"],
    ),
    ECC.counter(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for correctable errors.",
        lambda e: e.repairs.remapped_rows["corrected"],
    ),
    ECC.gauge("DEV_ROW_REMAP_FAILURE", "1 if remapping a row has failed.", lambda e: e.repairs.remapping_failed),
    GPM.gauge("PROF_GR_ENGINE_ACTIVE", _averaged("Graphics engine active, share of time"), _rate("graphics")),
    GPM.gauge("PROF_PIPE_TENSOR_ACTIVE", _averaged("Tensor pipe active, ratio"), _rate("tensor")),
    GPM.gauge("PROF_DRAM_ACTIVE", _averaged("Memory interface active, ratio"), _rate("dram")),
    GPM.gauge("PROF_PCIE_TX_BYTES", _averaged("PCIe transmitted, bytes/s"), _rate("pcie_transmit")),
    GPM.gauge("PROF_PCIE_RX_BYTES", _averaged("PCIe received, bytes/s"), _rate("pcie_receive")),
)


def _mhz(now: clocks.Clocks, domain: str) -> Number:
    return _scaled(now.hertz[domain], 1 / MEGA)


def _scaled(value: Number, factor: float) -> Number:
    return None if value is None else value * factor
