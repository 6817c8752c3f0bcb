"""The exporter itself: its version, whether the driver answers, and how many GPUs it should see."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.metric import Declaration


def _gauge(name: str, text: str, *labels: str) -> Declaration:
    return Declaration("gauge", f"rankscope_exporter_{name}", text, labels)


BUILD = _gauge("build_info", "Version of the exporter and its Python.", "version", "python_version")
NVML_UP = _gauge("nvml_up", "1 while the NVIDIA driver answers.")
SEEN = _gauge("gpus_seen", "GPUs that answer now.")
EXPECTED = _gauge("gpus_expected", "The most GPUs that the driver has reported since the exporter started.")
RELEASED = _gauge(
    "gpus_released",
    "1 while the GPUs' handles are given back on request (`POST /-/release`), for a reset or another driver: then all "
    "that `/metrics` says of GPUs is absent, but for their XID errors.",
)
METRICS = (BUILD, NVML_UP, SEEN, EXPECTED, RELEASED)


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


class ExporterCollector:
    """Answers even when nothing else does."""

    name = "exporter"
    help = "the exporter itself: version, driver, GPUs seen and expected"

    def __init__(self, driver: DriverState) -> None:
        self._driver = driver

    def collect(self) -> Iterable[Metric]:
        """Build info and the driver's state."""
        yield _single(BUILD, 1, __version__, platform.python_version())
        yield _single(NVML_UP, self._driver.nvml_up)
        yield _single(SEEN, self._driver.gpus_seen)
        yield _single(EXPECTED, self._driver.gpus_expected)
        yield _single(RELEASED, self._driver.is_released)


def _single(declaration: Declaration, value: float, *labels: str) -> Metric:
    family = declaration.family()
    family.add_metric(labels, value)
    return family
