"""Clocks, performance state, and throttled time by reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Reader, Tick
from rankscope_exporter.gpu.nvml.device import CLOCK_DOMAINS, CLOCK_EVENT_REASONS, Device
from rankscope_exporter.gpu.nvml.throttle import clock_event_seconds

# Clocks that are low because nothing runs, or because an administrator set them, are not throttled.
NO_THROTTLING = frozenset({"gpu_idle", "applications_clocks_setting"})


@dataclass(frozen=True)
class Clocks:
    """Hertz by domain, and throttled seconds by reason; None if the device reports no reasons."""

    hertz: Mapping[str, float | None]
    max_hertz: Mapping[str, float | None]
    performance_state: int | None
    throttled_seconds: Mapping[str, float] | None


class ThrottleMeter:
    """One GPU's throttled time by reason, from the driver's counter if it has one.

    Other reasons are integrated: a reason active at a reading counts for the time since the previous one. The source
    of a reason never changes while the exporter runs, because its counter would jump.
    """

    def __init__(self) -> None:
        # Every reason starts at 0, because a counter that first appears with a value never shows that increase.
        self._seconds = {reason: 0.0 for reason in CLOCK_EVENT_REASONS.values() if reason not in NO_THROTTLING}
        self._counted: frozenset[str] | None = None

    def __call__(self, device: Device, tick: Tick) -> Mapping[str, float] | None:
        """Return seconds by reason; None if the device reports neither reasons nor counters."""
        counted = clock_event_seconds(device)
        if self._counted is None:
            self._counted = frozenset(counted)
        reasons = device.clock_event_reasons()
        for reason in (reasons or frozenset()) - NO_THROTTLING - self._counted:
            self._seconds[reason] = self._seconds.get(reason, 0.0) + tick.elapsed
        integrated = {} if reasons is None else self._seconds
        own = {reason: seconds for reason, seconds in integrated.items() if reason not in self._counted}
        driver = {reason: seconds for reason, seconds in counted.items() if reason in self._counted}
        return own | driver or None


def reader() -> Reader[Clocks]:
    """Return a reader of clocks, and of throttled time so far. It reads maximum clocks once."""
    max_hertz = Cached(lambda device, _: _max_hertz(device))
    throttle = ThrottleMeter()
    return lambda device, tick: Clocks(
        hertz={domain: device.clock(domain) for domain in CLOCK_DOMAINS},
        max_hertz=max_hertz(device, tick),
        performance_state=device.performance_state(),
        throttled_seconds=throttle(device, tick),
    )


def _max_hertz(device: Device) -> Mapping[str, float | None]:
    return {domain: device.clock_max(domain) for domain in CLOCK_DOMAINS}


GPU = GpuMetrics[Clocks]()
METRICS = (
    GPU.gauge(
        "clock_hertz",
        "Current clock of the GPU, by domain.",
        lambda clocks: clocks.hertz,
        "domain",
        source="nvmlDeviceGetClockInfo",
    ),
    GPU.gauge(
        "clock_max_hertz",
        "Maximum clock of the GPU, by domain.",
        lambda clocks: clocks.max_hertz,
        "domain",
        source="nvmlDeviceGetMaxClockInfo",
    ),
    GPU.gauge(
        "performance_state",
        "Performance state (P-state): 0 is the highest performance, 15 the lowest.",
        lambda clocks: clocks.performance_state,
        source="nvmlDeviceGetPerformanceState",
        since="Kepler",
    ),
    GPU.counter(
        "throttled_seconds_total",
        "Time in which the GPU was throttled, by reason (several may apply at once): the driver's counter if there is "
        "one, otherwise integrated by the exporter. Idle clocks and administrator-set clocks do not count.",
        lambda clocks: clocks.throttled_seconds,
        "reason",
        source="nvmlDeviceGetFieldValues(PERF_POLICY_…, CLOCKS_EVENT_REASON_…), nvmlDeviceGetCurrentClocksEventReasons",
        since="Kepler",
    ),
)

COLLECTOR = GpuCollector("clocks", "clocks, performance state, and throttled time by reason", reader, METRICS)
