"""The exporter's own metrics: version, clock, driver state, and seen and expected GPUs."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.gpu.sampler import Sampler

EXPORTER = MetricTable[Sampler, Sampler]("rankscope_exporter_", (), whole)
METRICS = (
    EXPORTER.gauge(
        "build_info",
        "Version of the exporter and its Python.",
        lambda _: {(__version__, platform.python_version()): 1},
        "version",
        "python_version",
    ),
    EXPORTER.gauge(
        "time_seconds",
        "The exporter's clock at the scrape. All its timestamps use this clock, which may differ from Prometheus'.",
        lambda _: time.time(),
    ),
    EXPORTER.gauge("nvml_up", "1 while the NVIDIA driver answers.", lambda sampler: sampler.nvml_up),
    EXPORTER.gauge("gpus_seen", "Number of GPUs that answer now.", lambda sampler: sampler.gpus_seen),
    EXPORTER.gauge(
        "gpus_expected",
        "Highest number of GPUs that the driver has reported since the exporter started.",
        lambda sampler: sampler.gpus_expected,
    ),
    EXPORTER.gauge(
        "gpus_released",
        "1 while the GPU handles are released on request (`POST /-/release`), for a reset or a driver change. All GPU "
        "metrics except XID errors are then absent.",
        lambda sampler: sampler.is_released,
    ),
)


class ExporterCollector:
    """The exporter's own metrics, available even if nothing else answers."""

    name = "exporter"
    help = "the exporter itself: version, clock, driver, GPUs seen and expected"
    metrics = METRICS

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._cache = SampleCache(METRICS)

    def collect(self) -> Iterable[Metric]:
        """Return build info, the time and the driver's state."""
        return families(METRICS, [self._cache.write(self._sampler)])
