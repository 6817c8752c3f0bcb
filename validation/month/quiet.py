"""Select the stretches of a day in which an alert is possible; the others are left out.

Lags and losses are computed from the same samples as in the rules. A stretch is kept if one of them reaches 0.8 of a
tier's limit over that tier's span, or if something happens that other rules are about. More than an hour before it is
kept, because the rules look back that long for the run's baseline, and six minutes after it. Days that are judged
completely show that this leaves out no alert (report.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import yaml
from deploy.prometheus.shipped import HERE
from numpy.lib.stride_tricks import sliding_window_view
from validation.month.plan import DAY, Plan
from validation.month.record import SCRAPE, Record
from validation.month.samples import PLANNED, Stretch
from validation.month.steps import WAIT, Array, P

MARGIN = 0.8  # ratio of a tier's limit
BEFORE, AFTER = 260, 25  # scrapes
WINDOW = 2  # scrape intervals: the span of a rate
BASELINE = 240  # scrapes
STANDSTILL = 30.0  # seconds: two thirds of the shortest hang (stuck_floor)
PACE = 2.0  # half of the factor that a hang has compared with the longest pause of the hour before (stuck_pace)
LONG = 200.0  # seconds of a planned phase: two thirds of the shortest hang in it
UNUSUAL = ("restart", "exporter restart", "Prometheus restart", "compilation")
FAILED = 30.0  # seconds of failed scrapes

_LIMITS = yaml.safe_load((HERE / "thresholds.yml").read_text())
TIERS = [(row["limit"]["value"], row["span"]["evaluations"], row["dips"]["value"]) for row in _LIMITS["tiers"]["rows"]]
STEPS = _LIMITS["min_steps_to_alert"]["value"]
CHECKPOINTS = _LIMITS["checkpoint_limit"]["value"]
ALLOWED = {name: _LIMITS[f"{name}_allowance"]["value"] for name in ("network", "straggler", "loss")}


def stretches(plan: Plan, record: Record) -> Iterator[Stretch]:
    """Yield the stretches of a day in which an alert is possible, in their order, separated by others."""
    begin, end = -1, -1
    for scrape in np.flatnonzero(_may_alert(plan, record)):
        first, last = int(scrape) - BEFORE, int(scrape) + AFTER
        if end >= 0 and first <= end:
            end = last
            continue
        if end >= 0:
            yield Stretch(plan, record, begin, end)
        begin, end = first, last
    if end >= 0:
        yield Stretch(plan, record, begin, end)


def _may_alert(plan: Plan, record: Record) -> Array:
    found = np.zeros(len(record.times), bool)
    shortest = plan.step * min(1.0, *(factor for _, factor in plan.lengths_over_time), 1.0)
    for values in _losses(plan, record):
        for limit, span, dips in TIERS:
            if span * SCRAPE / shortest >= MARGIN * STEPS:
                found |= _reaches(values, MARGIN * limit, span, dips)
    found |= _stands_still(record) | _has_long_checkpoints(plan, record)
    longest = dict.fromkeys(("checkpoint", "evaluation"), LONG)
    for one in plan.events:
        is_long = one.seconds > longest.get(one.kind, DAY)
        if is_long:
            longest[one.kind] = one.seconds
        is_failing = one.kind == "missed scrape" and one.seconds > FAILED
        if one.kind in UNUSUAL or is_long or is_failing:
            found |= (record.times >= one.at) & (record.times <= one.at + one.seconds + SCRAPE)
    for when in (*(one[0] for one in plan.lengths_over_time), *(one[0] for one in plan.caps)):
        found |= np.abs(record.times - when) <= SCRAPE
    return found


def _stands_still(record: Record) -> Array:
    """Return whether the run stands still far longer than in the hour before, outside of planned phases."""
    is_planned = np.isin(record.phase, PLANNED).any(axis=1)
    stands = np.where(is_planned, 0.0, record.times - record.since.max(axis=1))
    before = np.concatenate((np.zeros(BASELINE), stands))[: len(stands) + BASELINE - 1]
    longest = sliding_window_view(before, BASELINE).max(axis=1)
    return (stands > STANDSTILL) & (stands > PACE * longest)


def _has_long_checkpoints(plan: Plan, record: Record) -> Array:
    """Return the hours in which several checkpoints take a large part of the time."""
    share = _shares(plan, record)[:, P["checkpoint"]].max(axis=1)
    found = np.zeros(len(share), bool)
    for scrape in range(BASELINE, len(share)):
        hour = slice(scrape - BASELINE, scrape)
        written = record.checkpoints[scrape] - record.checkpoints[scrape - BASELINE]
        if written > 1 and share[hour].mean() * (1 - 1 / written) > MARGIN * CHECKPOINTS:
            found[hour] = True
    return found


def _losses(plan: Plan, record: Record) -> Iterator[Array]:
    """Yield ratios of the time by scrape: the largest lag, and losses by cause above their allowance."""
    shares = _shares(plan, record)
    waits, planned = shares[:, WAIT], shares[:, PLANNED].sum(axis=1)
    alone = planned - planned.mean(axis=1, keepdims=True)  # in a planned phase, while the others wait
    yield (np.median(waits, axis=1, keepdims=True) - waits - alone).max(axis=1)
    floor, skew = (_growth(values) for values in (record.floor, record.skew))
    with np.errstate(invalid="ignore"):
        transfer = waits.mean(axis=1) * np.nan_to_num(floor / (floor + skew)).min(axis=1)
    yield _above_allowance(transfer, ALLOWED["network"])
    yield _above_allowance(waits.mean(axis=1) - transfer - alone.max(axis=1), ALLOWED["straggler"])
    for name in ("data_wait", "h2d_copy"):
        yield _above_allowance(shares[:, P[name]].mean(axis=1), ALLOWED["loss"])
    yield 1 - record.clock - ALLOWED["loss"]


def _shares(plan: Plan, record: Record) -> Array:
    """Return ratios of the time by scrape, phase and rank."""
    grown = _growth(record.seconds)
    if plan.clock == "device":
        measured = _growth(record.measured)
        measured[:, PLANNED] = 0
        rest = grown.sum(axis=1) - grown[:, PLANNED].sum(axis=1)
        with np.errstate(invalid="ignore"):
            grown = np.nan_to_num(measured / measured.sum(axis=1, keepdims=True)) * rest[:, None]
    return grown / (WINDOW * SCRAPE)


def _growth(counter: Array) -> Array:
    grown = np.zeros_like(counter)
    grown[WINDOW:] = counter[WINDOW:] - counter[:-WINDOW]
    return np.maximum(grown, 0)


def _above_allowance(values: Array, allowed: float) -> Array:
    """Return the values above their allowance or the run's baseline, the lower quartile of the hour before.

    The baseline is reduced by a tenth, to leave out less.
    """
    baseline = np.full(len(values), allowed)
    for begin in range(BASELINE, len(values), BASELINE // 4):
        quarter = 0.9 * np.quantile(values[begin - BASELINE : begin], 0.25)
        baseline[begin : begin + BASELINE // 4] = min(allowed, quarter)
    return values - baseline


def _reaches(values: Array, limit: float, span: int, dips: float) -> Array:
    """Return where the last `span` values exceed the limit on average, and half of it except for a ratio of dips."""
    found = np.zeros(len(values), bool)
    if len(values) >= span:
        windows = sliding_window_view(values, span)
        found[span - 1 :] = (windows.mean(axis=1) > limit) & (np.quantile(windows, dips, axis=1) > limit / 2)
    return found
