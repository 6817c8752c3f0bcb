"""The evaluation of Prometheus' data after a soak: where counters fell, and when which alert fired."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from testing.servers import Prometheus

STEP = 15.0  # seconds between two evaluations
Sample = tuple[float, float]


def history(prometheus: Prometheus, seconds: float) -> dict[str, Any]:
    """Return the input of the checks, from raw samples. Counters are queried one at a time."""
    span = f"[{int(seconds) + 60}s]"
    falls: list[dict[str, Any]] = []
    series = samples = 0
    for name in _names(prometheus):
        if name.startswith("rankscope_") and name.endswith(("_total", "_bucket", "_count", "_sum")):
            for one in prometheus.query(name + span):
                values = [(when, float(value)) for when, value in one["values"]]
                series, samples = series + 1, samples + len(values)
                falls += [{"labels": one["metric"], **fall} for fall in decreases(values)]
    starts = [_changes(one) for one in prometheus.query("rankscope_rank_start_timestamp_seconds" + span)]
    firing = [_fired(one) for one in prometheus.query('ALERTS{alertstate="firing"}' + span)]
    return {"counters": series, "samples": samples, "falls": falls, "starts": starts, "firing": firing}


def decreases(values: Sequence[Sample]) -> Iterator[dict[str, float]]:
    """Yield each sample that is less than the one before."""
    for (before, was), (after, value) in pairwise(values):
        if value < was:
            yield {"before": before, "after": after, "was": was, "is": value}


def spans(times: Sequence[float], gap: float) -> list[tuple[float, float]]:
    """Return the spans (first, last) without a gap of more than `gap` seconds."""
    found: list[tuple[float, float]] = []
    for when in times:
        if found and when - found[-1][1] <= gap:
            found[-1] = found[-1][0], when
        else:
            found.append((when, when))
    return found


def _changes(one: dict[str, Any]) -> dict[str, Any]:
    """Return when the rank's start time was first seen, for each start."""
    found: list[tuple[float, float]] = []
    for when, value in one["values"]:
        if not found or found[-1][1] != float(value):
            found.append((when, float(value)))
    return {"labels": one["metric"], "changes": found}


def _fired(one: dict[str, Any]) -> dict[str, Any]:
    return {"labels": one["metric"], "spans": spans([when for when, _ in one["values"]], 1.5 * STEP)}


def _names(prometheus: Prometheus) -> list[str]:
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/label/__name__/values", timeout=30) as answer:
        names: list[str] = json.load(answer)["data"]
    return names
