"""The exporter itself: its version and clock, whether the driver answers, and how many GPUs it should see."""

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
    """What the sampler knows about the driver."""

    @property
    def nvml_up(self) -> bool:
        """Whether the driver answers."""

    @property
    def gpus_seen(self) -> int:
        """GPUs that answer now."""

    @property
    def gpus_expected(self) -> int:
        """The most GPUs that the driver has reported since the start."""

    @property
    def is_released(self) -> bool:
        """Whether the handles are given back on request."""


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
        "The exporter's clock when it answered: all times that it shows are by this one, which may not be Prometheus'.",
        lambda _: time.time(),
    ),
    EXPORTER.gauge("nvml_up", "1 while the NVIDIA driver answers.", lambda driver: driver.nvml_up),
    EXPORTER.gauge("gpus_seen", "GPUs that answer now.", lambda driver: driver.gpus_seen),
    EXPORTER.gauge(
        "gpus_expected",
        "The most GPUs that the driver has reported since the exporter started.",
        lambda driver: driver.gpus_expected,
    ),
    EXPORTER.gauge(
        "gpus_released",
        "1 while the GPUs' handles are given back on request (`POST /-/release`), for a reset or another driver: then "
        "all that `/metrics` says of GPUs is absent, but for their XID errors.",
        lambda driver: driver.is_released,
    ),
)


class ExporterCollector:
    """Answers even when nothing else does."""

    name = "exporter"
    help = "the exporter itself: version, clock, driver, GPUs seen and expected"
    metrics = METRICS

    def __init__(self, driver: DriverState) -> None:
        self._driver = driver
        self._cache = SampleCache(METRICS)

    def collect(self) -> Iterable[Metric]:
        """Build info, the time, and the driver's state."""
        return families(METRICS, [self._cache.write(self._driver)])
