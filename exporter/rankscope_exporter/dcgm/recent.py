"""Averages of a collector's counters over the last seconds, for dcgm-exporter's gauges of utilization and rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from rankscope_exporter.gpu.collector import GpuCollector, Reader, Tick
from rankscope_exporter.gpu.nvml.device import Device

R = TypeVar("R")

# Seconds: the scrape interval of deploy/prometheus. Scrapes at that interval together cover all time; a longer window
# would delay an autoscaler.
WINDOW = 15.0

Amounts = Mapping[tuple[str, str], float]
"""Cumulative counts, or their increase per second, by GPU instance and quantity."""


def averaging(collector: GpuCollector[R], counts: Callable[[R], Amounts], rates: dict[str, Amounts]) -> GpuCollector[R]:
    """Return the collector to read instead of this one. It averages in the thread that reads, and not for each scrape.

    `counts` extracts the counters from a reading. The increase per second of every quantity that has two readings is
    in `rates`, by the GPU's UUID.
    """
    return replace(collector, reader=lambda: _Averaging(collector.reader(), counts, rates))


class _Averaging(Generic[R]):
    """Reader of one GPU. Does not average across a failure, a gap or a counter reset."""

    def __init__(self, read: Reader[R], counts: Callable[[R], Amounts], rates: dict[str, Amounts]) -> None:
        self._read = read
        self._counts = counts
        self._rates = rates
        self._seen = deque[tuple[float, Amounts]]()

    def __call__(self, device: Device, tick: Tick) -> R | None:
        """Read, update the averages, and return the unchanged reading."""
        seen, self._seen = self._seen, deque()
        rates: Amounts = {}
        try:
            reading = self._read(device, tick)
            if reading is not None:
                self._seen = _append(seen, tick.elapsed, self._counts(reading))
                rates = _averages(self._seen)
            return reading
        finally:
            self._rates[device.uuid] = rates  # assigned once, at the end: a concurrent scrape gets the previous rates


def _append(seen: deque[tuple[float, Amounts]], elapsed: float, counts: Amounts) -> deque[tuple[float, Amounts]]:
    if not seen or not elapsed or any(counts.get(quantity, -1.0) < count for quantity, count in seen[-1][1].items()):
        return deque([(0.0, counts)])
    now = seen[-1][0] + elapsed
    seen.append((now, counts))
    while now - seen[0][0] > WINDOW:
        seen.popleft()
    return seen


def _averages(seen: deque[tuple[float, Amounts]]) -> Amounts:
    now, counts = seen[-1]
    found = {}
    for quantity, count in counts.items():
        # Counters may start after the first reading: GPM at the second, a MIG instance when it is created.
        since, before = next((moment, earlier[quantity]) for moment, earlier in seen if quantity in earlier)
        if now > since:
            found[quantity] = (count - before) / (now - since)
    return found
