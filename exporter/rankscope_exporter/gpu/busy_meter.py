"""How long an engine of a GPU ran, and for how long it has been idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Tick
from rankscope_exporter.gpu.nvml.device import Device, Engine
from rankscope_exporter.gpu.sample_ring import Covered, SampleRing

LATEST = 5.0  # seconds after its end at which a driver may add a sample to its ring
CLOCK_STEP = 1.0  # seconds by which the node's clock has to be set until a timestamp follows it


@dataclass(frozen=True)
class Load:
    """Seconds of kernels since the exporter first saw the GPU, and when one was last seen."""

    busy_seconds: float
    last_busy: float
    """Unix time by the exporter's clock; of an engine never seen busy when the GPU was first seen."""
    idle_for: float
    """Seconds; infinite if the engine was never seen busy."""


class BusyMeter:
    """Integrates the utilization of one GPU, or of one of its engines.

    The driver keeps some seconds of samples, and all that it gained since the last reading are added up, so bursts
    between two readings count. Each sample counts for the sampling period that it covers, and all of them for no more
    than the time that has passed: what the driver kept no sample of, or has overwritten, is not invented. A GPU
    without a ring is integrated from its instantaneous utilization, which misses what happens between readings.
    """

    def __init__(self, engine: Engine = "gpu") -> None:
        self._engine = engine
        self._ring = SampleRing()
        self._busy_seconds = 0.0
        self._unaccounted = 0.0  # seconds that have passed and that a sample may still cover
        self._early = Covered(0.0, 0.0)  # samples that cover more time than had passed at the last reading
        self._read_at: float | None = None  # by the steady clock, as `_idle_since`
        self._idle_since = 0.0
        self._was_busy = False
        self._last_busy = 0.0  # unix time

    def __call__(self, device: Device, tick: Tick) -> Load | None:
        """Add what happened since the last reading. Returns None if the device does not report its utilization."""
        if device.samples_utilization(self._engine):
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

    def _charge(self, gained: Sequence[Covered], now: float) -> None:
        """Add the time of new samples. Those that the ring had before the first reading do not count."""
        if self._read_at is None:
            self._unaccounted = self._ring.period
            return
        passed = self._unaccounted + now - self._read_at
        covered = self._early.seconds + sum(sample.seconds for sample in gained)
        busy = self._early.share * self._early.seconds + sum(sample.share * sample.seconds for sample in gained)
        charged, share = min(covered, passed), busy / covered if covered else 0.0
        self._busy_seconds += charged * share
        self._unaccounted = min(passed - charged, LATEST)
        self._early = Covered(share, min(covered - charged, LATEST))

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


def _idle_seconds(gained: Sequence[Covered]) -> float | None:
    """Return the seconds since the last busy sample; None if there is none."""
    idle_for = 0.0
    for sample in reversed(gained):
        if sample.share > 0:
            return idle_for
        idle_for += sample.seconds
    return None
