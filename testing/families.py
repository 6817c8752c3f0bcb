"""Metric families with the samples that a test names."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.exposition.metric import Declaration, WrittenFamily


def family(name: str, *samples: tuple[Mapping[str, str], float]) -> WrittenFamily:
    """Return a gauge, or a counter if the name says so, with these samples."""
    labels = tuple(samples[0][0]) if samples else ()
    declared = Declaration("counter" if name.endswith("_total") else "gauge", f"rankscope_{name}", "Help.", labels)
    return declared.family({tuple(values.values()): value for values, value in samples})
