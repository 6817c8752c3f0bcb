"""Busy time and idle time of a GPU engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, Tick
from rankscope_exporter.gpu.nvml.device import Device, Engine
from rankscope_exporter.gpu.nvml.errors import DeviceLostError, DriverError
from rankscope_exporter.gpu.nvml.gpm import sampler_of
from rankscope_exporter.gpu.nvml.mig import gpu_instances
from rankscope_exporter.gpu.sample_ring import CoveredSample, SampleRing

MAX_DELAY = 5.0  # seconds between the end of a sample and its appearance in the driver's ring
CLOCK_STEP = 1.0  # seconds; timestamps follow the node's clock if it is set by more than this
MIG_AFTER = 10.0  # seconds until a GPU that administrators split is noticed
# A GPU below both is idle. An idle H200 with a process has 6e-5 of the time and 4 MB/s; one that loads data 26 GB/s.
HOUSEKEEPING = 1e-3  # share of the time in which kernels run
COPYING = 1e8  # bytes per second over PCIe


@dataclass(frozen=True)
class Load:
    """Busy seconds since the exporter first saw the GPU, and the last busy time."""

    busy_seconds: float
    last_busy: float
    """Unix time by the exporter's clock. If the engine was never busy: when the GPU was first seen."""
    idle_for: float
    """Seconds; infinite if the engine was never busy."""


class BusyMeter:
    """Integrator of the utilization of one GPU engine.

    For kernels, the source is GPM (Hopper and later), whose activity covers exactly the time between two readings.
    The driver's samples of utilization are averages there, which lag by about six seconds and stay above zero for
    half a minute after the last kernel (measured on an H200, driver 580.159.04). A GPU that only copies from or to the
    host runs no kernel, but is not idle.

    Elsewhere the driver keeps some seconds of samples. All samples since the last reading are added up, so bursts
    between two readings count. A sample counts for its sampling period, and all samples together for at most the
    elapsed time: time without samples, or with overwritten ones, adds nothing. Without a ring, instantaneous
    utilization is integrated, which misses activity between readings.
    """

    def __init__(self, engine: Engine = "gpu") -> None:
        self._engine = engine
        self._ring = SampleRing()
        self._busy_seconds = 0.0
        self._unaccounted = 0.0  # elapsed seconds that a late sample may still cover
        self._early = CoveredSample(0.0, 0.0)  # samples that covered more than the elapsed time at the last reading
        self._is_ring_old = False  # whether its samples are from before the last reading
        self._read_at: float | None = None  # steady clock, like `_idle_since`
        self._has_gpm = Cached(lambda device, _: device.supports_gpm() and not gpu_instances(device), MIG_AFTER)
        self._idle_since = 0.0
        self._was_busy = False
        self._last_busy = 0.0  # unix time

    def __call__(self, device: Device, tick: Tick) -> Load | None:
        """Add the activity since the last reading. Returns None if the device does not report its utilization."""
        activity = self._activity(device, tick)
        if (kernels := activity.get("graphics")) is not None:
            self._busy_seconds += min(kernels, tick.elapsed)
            copied = activity.get("pcie_receive", 0.0) + activity.get("pcie_transmit", 0.0)
            is_busy = kernels > HOUSEKEEPING * tick.elapsed or copied > COPYING * tick.elapsed
            idle_for = 0.0 if is_busy else None
            self._is_ring_old = True
        elif device.samples_utilization(self._engine):
            if self._is_ring_old:
                self._ring, self._unaccounted, self._early = SampleRing(), 0.0, CoveredSample(0.0, 0.0)
            gained = self._ring.read(device.utilization_samples(self._engine) or ())
            self._charge(gained, tick.steady)
            idle_for = _idle_seconds(gained)
        else:
            utilization = device.utilization(self._engine)
            if utilization is None:
                return None
            self._busy_seconds += utilization * tick.elapsed
            idle_for = 0.0 if utilization else None
        return self._load(tick, idle_for)

    def _activity(self, device: Device, tick: Tick) -> Mapping[str, float]:
        """Return the GPU's activity since the last reading, from GPM; empty if that is unknown."""
        if self._engine != "gpu" or not self._has_gpm(device, tick):
            return {}
        try:
            return sampler_of(device).measure(tick.elapsed, tick.steady)
        except DeviceLostError:
            raise
        except DriverError:  # the samples may still answer
            return {}

    def _charge(self, gained: Sequence[CoveredSample], now: float) -> None:
        """Add the time of new samples. Samples in the ring before the first reading do not count."""
        if self._read_at is None or self._is_ring_old:
            self._unaccounted, self._is_ring_old = self._ring.period, False
            return
        passed = self._unaccounted + now - self._read_at
        covered = self._early.seconds + sum(sample.seconds for sample in gained)
        busy = self._early.share * self._early.seconds + sum(sample.share * sample.seconds for sample in gained)
        charged, share = min(covered, passed), busy / covered if covered else 0.0
        self._busy_seconds += charged * share
        self._unaccounted = min(passed - charged, MAX_DELAY)
        self._early = CoveredSample(share, min(covered - charged, MAX_DELAY))

    def _load(self, tick: Tick, idle_for: float | None) -> Load:
        """Return the load; `idle_for` is None if the engine was not busy since the last reading."""
        is_first, read_at = self._read_at is None, self._read_at or -math.inf
        self._read_at = tick.steady
        if idle_for is not None:
            self._idle_since, self._was_busy = max(tick.steady - idle_for, read_at), True
        elif is_first:
            self._idle_since = tick.steady
        last_busy = tick.unix - (tick.steady - self._idle_since)
        if is_first or idle_for is not None or abs(last_busy - self._last_busy) > CLOCK_STEP:
            self._last_busy = last_busy
        idle_seconds = tick.steady - self._idle_since
        return Load(self._busy_seconds, self._last_busy, idle_seconds if self._was_busy else math.inf)


def _idle_seconds(gained: Sequence[CoveredSample]) -> float | None:
    """Return the seconds since the last busy sample; None if there is none."""
    idle_for = 0.0
    for sample in reversed(gained):
        if sample.share > 0:
            return idle_for
        idle_for += sample.seconds
    return None
