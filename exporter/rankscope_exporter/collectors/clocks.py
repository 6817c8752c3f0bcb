"""Clocks, and for how long what held them down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope_exporter.families import CounterMetricFamily, GaugeMetricFamily
from rankscope_exporter.nvml.device import CLOCK_DOMAINS, CLOCK_EVENT_REASONS, Device
from rankscope_exporter.source import GPU_LABELS, Gpu, GpuSource, Tick, by_label

# Clocks that are low because nothing runs, or because somebody set them so, are no throttling.
NO_THROTTLING = frozenset({"gpu_idle", "applications_clocks_setting"})


@dataclass(frozen=True)
class Clocks:
    """Hertz by domain, and seconds by reason since the exporter first saw the GPU; None if no reasons are told."""

    hertz: Mapping[str, float | None]
    max_hertz: Mapping[str, float | None]
    throttled_seconds: Mapping[str, float] | None


class ThrottleMeter:
    """Integrates one GPU's throttle reasons: one that holds at a reading is taken to have held since the last."""

    def __init__(self) -> None:
        # Each from 0 on, because a counter that is born with its first second never increases by that second.
        self._seconds = {reason: 0.0 for reason in CLOCK_EVENT_REASONS.values() if reason not in NO_THROTTLING}

    def __call__(self, device: Device, tick: Tick) -> Clocks:
        """The clocks now, and the reasons so far."""
        reasons = device.clock_event_reasons()
        for reason in (reasons or frozenset()) - NO_THROTTLING:
            self._seconds[reason] = self._seconds.get(reason, 0.0) + tick.elapsed
        return Clocks(
            hertz={domain: device.clock(domain) for domain in CLOCK_DOMAINS},
            max_hertz={domain: device.clock_max(domain) for domain in CLOCK_DOMAINS},
            throttled_seconds=None if reasons is None else dict(self._seconds),
        )


def families(readings: Mapping[Gpu, Clocks | None]) -> Iterable[Metric]:
    """Clocks now, their maxima, and throttled time."""
    labels = (*GPU_LABELS, "domain")
    clock = GaugeMetricFamily("rankscope_gpu_clock_hertz", "Clock of the GPU now.", labels=labels)
    yield by_label(clock, readings, lambda clocks: clocks.hertz)
    highest = GaugeMetricFamily(
        "rankscope_gpu_clock_max_hertz", "Highest clock that the GPU can run at.", labels=labels
    )
    yield by_label(highest, readings, lambda clocks: clocks.max_hertz)
    text = "Time in which the GPU's clocks were held down, by reason; several may hold at once."
    throttled = CounterMetricFamily("rankscope_gpu_throttled_seconds", text, labels=(*GPU_LABELS, "reason"))
    yield by_label(throttled, readings, lambda clocks: clocks.throttled_seconds or {})


SOURCE = GpuSource("clocks", "clocks, and throttled time by reason", ThrottleMeter, families)
