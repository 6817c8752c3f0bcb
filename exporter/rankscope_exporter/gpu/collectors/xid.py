"""XID errors reported by the driver, by code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.exposition.sample_cache import SampleCache, Texts, families
from rankscope_exporter.gpu.collector import Gpu, GpuMetrics
from rankscope_exporter.gpu.xid_watcher import Xids

# Codes with their own entry in NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors) that occur in training jobs.
# They start at 0, because a counter that first appears at 1 never shows that increase. Any other code appears with its
# first event.
WELL_KNOWN = (
    13,  # graphics engine exception
    31,  # GPU memory page fault
    32,  # invalid or corrupted push buffer
    43,  # GPU stopped processing
    45,  # preemptive cleanup after another error
    46,  # GPU stopped processing, reset needed
    48,  # double-bit ECC error
    61,  # internal micro-controller breakpoint
    62,  # internal micro-controller halt
    63,  # ECC page retirement or row remapping recorded
    64,  # ECC page retirement or row remapping failed
    68,  # video processor exception
    69,  # graphics engine class error
    74,  # NVLink error
    79,  # GPU has fallen off the bus
    92,  # high single-bit ECC error rate
    94,  # contained ECC error
    95,  # uncontained ECC error
    119,  # GSP RPC timeout
    120,  # GSP error
    121,  # C2C link error
    122,  # SPI PMU RPC read failure
    140,  # unrecovered ECC error
)


def _counts(xids: Xids) -> Values:
    counts = xids.counts
    return None if counts is None else {str(code): counts.get(code, 0) for code in sorted({*WELL_KNOWN, *counts})}


GPU = GpuMetrics[Xids](source="nvmlEventSetWait", since="Kepler")
METRICS = (
    GPU.counter(
        "xid_errors_total",
        "XID errors reported by the driver, by code. Well-known codes start at 0. Remains when the GPU is lost: "
        "XID 79 is its last event.",
        _counts,
        "xid",
    ),
    GPU.gauge(
        "xid_last_timestamp_seconds",
        "Unix time when the driver last reported this XID error; absent if it never occurred.",
        lambda xids: {str(code): unix for code, unix in sorted(xids.last.items())},
        "xid",
    ),
)


class XidCollector:
    """Counts of XID events. They remain valid when the GPU is lost: XID 79 is its last event."""

    name = "xid"
    help = "XID errors by code, and when each was last seen"
    metrics = METRICS

    def __init__(self, xids: Callable[[], Mapping[Gpu, Xids]]) -> None:
        """`xids` returns the XID events of every GPU ever seen."""
        self._xids = xids
        self._written: dict[Gpu, tuple[Xids, Texts]] = {}

    def collect(self) -> Iterable[Metric]:
        """Return every GPU's events by code, including lost GPUs."""
        self._written = {gpu: self._write(gpu, xids) for gpu, xids in self._xids().items()}
        return families(METRICS, [texts for _, texts in self._written.values()])

    def _write(self, gpu: Gpu, xids: Xids) -> tuple[Xids, Texts]:
        """Return the events and their lines. The lines are rewritten only after an event, which is rare."""
        known = self._written.get(gpu)
        return known if known and known[0] is xids else (xids, SampleCache(METRICS, gpu.values()).write(xids))
