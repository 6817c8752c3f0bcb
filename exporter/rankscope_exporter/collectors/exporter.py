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
        yield BUILD.family({(__version__, platform.python_version()): 1})
        yield NVML_UP.family(self._driver.nvml_up)
        yield SEEN.family(self._driver.gpus_seen)
        yield EXPECTED.family(self._driver.gpus_expected)
        yield RELEASED.family(self._driver.is_released)
