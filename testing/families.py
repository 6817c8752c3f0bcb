"""Metric families with the samples that a test names."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def family(name: str, *samples: tuple[Mapping[str, str], float]) -> Metric:
    """Return a gauge, or a counter if the name says so, with these samples."""
    labels = [*samples[0][0]] if samples else []
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(f"rankscope_{name.removesuffix('_total')}", "Help.", labels=labels)
    for values, value in samples:
        made.add_metric([*values.values()], value)
    return made
