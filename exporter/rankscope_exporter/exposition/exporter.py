"""The exporter's own metrics: version, clock, driver state, and seen and expected GPUs."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families


class DriverState(Protocol):
    """The sampler's view of the driver."""

    @property
    def nvml_up(self) -> bool:
        """True while the driver answers."""

    @property
    def gpus_seen(self) -> int:
        """Number of GPUs that answer now."""

    @property
    def gpus_expected(self) -> int:
        """Highest number of GPUs that the driver has reported since the start."""

    @property
    def is_released(self) -> bool:
        """True while the GPU handles are released on request."""


EXPORTER = MetricTable[DriverState, DriverState]("rankscope_exporter_", (), whole)
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
    EXPORTER.gauge("nvml_up", "1 while the NVIDIA driver answers.", lambda driver: driver.nvml_up),
    EXPORTER.gauge("gpus_seen", "Number of GPUs that answer now.", lambda driver: driver.gpus_seen),
    EXPORTER.gauge(
        "gpus_expected",
        "Highest number of GPUs that the driver has reported since the exporter started.",
        lambda driver: driver.gpus_expected,
    ),
    EXPORTER.gauge(
        "gpus_released",
        "1 while the GPU handles are released on request (`POST /-/release`), for a reset or a driver change. All GPU "
        "metrics except XID errors are then absent.",
        lambda driver: driver.is_released,
    ),
)


class ExporterCollector:
    """The exporter's own metrics, available even if nothing else answers."""

    name = "exporter"
    help = "the exporter itself: version, clock, driver, GPUs seen and expected"
    metrics = METRICS

    def __init__(self, driver: DriverState) -> None:
        self._driver = driver
        self._cache = SampleCache(METRICS)

    def collect(self) -> Iterable[Metric]:
        """Return build info, the time and the driver's state."""
        return families(METRICS, [self._cache.write(self._driver)])
