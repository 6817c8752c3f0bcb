"""Averages over the last seconds of what a collector counts: dcgm-exporter's gauges of utilization and of rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from rankscope_exporter.gpu.collector import Gpu, GpuCollector, Reader, Tick
from rankscope_exporter.gpu.nvml.device import Device

R = TypeVar("R")

# Seconds: the scrape interval of deploy/prometheus. Scraped as often as that, the gauges together leave out nothing; a
# longer window would make an autoscaler slow.
WINDOW = 15.0

Amounts = Mapping[tuple[str, str], float]
"""Counts since some beginning, or their increase a second, by GPU instance and quantity."""


class Recent(Generic[R]):
    """A collector whose counters are averaged beside, in the thread that reads them: no scraper disturbs another."""

    def __init__(self, collector: GpuCollector[R], counts: Callable[[R], Amounts]) -> None:
        """`counts` takes the counters out of a reading."""
        self._counts = counts
        self._rates: dict[str, Amounts] = {}
        self.collector = replace(collector, reader=lambda: _Averaging(collector.reader(), self._counts, self._rates))
        """What is to be read instead of the collector that was given."""

    def rates(self, gpu: Gpu) -> Amounts:
        """The increase a second, of every quantity for which two readings were seen."""
        return self._rates.get(gpu.uuid, {})


class _Averaging(Generic[R]):
    """Reads one GPU. Nothing is averaged across a failure, a gap, or a counter that begins anew."""

    def __init__(self, read: Reader[R], counts: Callable[[R], Amounts], rates: dict[str, Amounts]) -> None:
        self._read = read
        self._counts = counts
        self._rates = rates
        self._seen = deque[tuple[float, Amounts]]()

    def __call__(self, device: Device, tick: Tick) -> R | None:
        """Read, and keep the averages. Returns the reading as it is."""
        seen, self._seen = self._seen, deque()
        rates: Amounts = {}
        try:
            reading = self._read(device, tick)
            if reading is not None:
                self._seen = _with(seen, tick.elapsed, self._counts(reading))
                rates = _averages(self._seen)
            return reading
        finally:
            self._rates[device.uuid] = rates  # once, at the end: a scrape in the meantime has those of before


def _with(seen: deque[tuple[float, Amounts]], elapsed: float, counts: Amounts) -> deque[tuple[float, Amounts]]:
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
        # Not all begin with the first reading: GPM counts from the second on, a MIG instance when it is made.
        since, before = next((moment, earlier[quantity]) for moment, earlier in seen if quantity in earlier)
        if now > since:
            found[quantity] = (count - before) / (now - since)
    return found
