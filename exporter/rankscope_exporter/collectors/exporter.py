"""The exporter itself: its version, whether the driver answers, and how many GPUs it should see."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.families import GaugeMetricFamily


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


class ExporterCollector:
    """Answers even when nothing else does."""

    name = "exporter"
    help = "the exporter itself: version, driver, GPUs seen and expected"

    def __init__(self, driver: DriverState) -> None:
        self._driver = driver

    def collect(self) -> Iterable[Metric]:
        """Build info and the driver's state."""
        text = "Version of the exporter and its Python."
        build = _gauge("build_info", text, labels=["version", "python_version"])
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
        yield _gauge("nvml_up", "1 while the NVIDIA driver answers.", self._driver.nvml_up)
        yield _gauge("gpus_seen", "GPUs that answer now.", self._driver.gpus_seen)
        text = "The most GPUs that the driver has reported since the exporter started."
        yield _gauge("gpus_expected", text, self._driver.gpus_expected)


def _gauge(name: str, text: str, value: float | None = None, labels: Sequence[str] | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rankscope_exporter_{name}", text, value, labels)
