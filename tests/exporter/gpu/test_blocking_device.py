"""Costs of a fault according to validation/blocking_device.py, and a short end-to-end run on the C simulator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from validation import blocking_device
from validation.blocking_device import BUSY, GPUS, LAST, UP, Seen, faults, measure, parse, phases, rows, scenario

PLANNED = faults(10, 30, 10)
START = 1_800_000_000.0
TIMELINES = scenario(PLANNED).timelines


def scrape(at: float) -> Seen:
    """Return the scrape of an ideal exporter that detects every change at once."""
    down = {gpu for fault in PLANNED for gpu in fault.gpus if fault.start <= at < fault.end}
    values = {
        UP: {gpu: float(gpu not in down) for gpu in range(GPUS)},
        BUSY: {gpu: TIMELINES[gpu].seconds(at).utilized for gpu in range(GPUS) if gpu not in down},
        LAST: {gpu: START + at for gpu in range(GPUS) if gpu not in down},
    }
    others = {gpu: 50 for gpu in range(GPUS) if gpu not in down}
    return Seen(at, 0.004, values, others, has_nan=False, threads=9, resident_bytes=2**25)


SEEN = [scrape(float(at)) for at in range(5, 100)]


def found(seen: list[Seen], fault: str) -> dict[str, Any]:
    return dict(rows(PLANNED, seen, TIMELINES, START)["faults"][fault])


def test_an_ideal_exporter_loses_nothing() -> None:
    for fault in PLANNED:
        row = found(SEEN, fault.name)
        assert row["down_after_seconds"] == row["back_after_seconds"] == 0
        assert row["series_while_down"] == row["others_down"] == row["decreases"] == 0
        assert not row["others_lost_busy_seconds"]
        assert row["scrapes_while_down"] == fault.end - fault.start


def test_a_value_of_a_gpu_that_is_down_is_detected() -> None:
    stale = [replace(s, others={**s.others, 3: 1}) if s.at == 20 else s for s in SEEN]
    assert found(stale, "blocked")["series_while_down"] == 1


def test_busy_time_that_another_gpu_loses_or_gains_is_detected() -> None:
    def shifted(s: Seen, seconds: float) -> Seen:
        busy = {**s.values[BUSY], 0: s.values[BUSY][0] + seconds}
        return replace(s, values={**s.values, BUSY: busy})

    late = [shifted(s, -2.0) if 20 <= s.at < 70 else s for s in SEEN]
    assert found(late, "blocked")["others_lost_busy_seconds"] == 2
    assert found(late, "blocked")["decreases"] == 1
    early = [shifted(s, 2.0) if 20 <= s.at < 70 else s for s in SEEN]
    assert found(early, "blocked")["others_lost_busy_seconds"] == -2


def test_another_gpu_that_is_down_or_missing_is_detected() -> None:
    missing = [replace(s, values={**s.values, UP: {3: 0.0}}) if s.at == 20 else s for s in SEEN]
    assert found(missing, "blocked")["others_down"] == GPUS - 1


def test_an_undetected_fault_has_no_times() -> None:
    blind = [replace(s, values={**s.values, UP: dict.fromkeys(range(GPUS), 1.0)}) for s in SEEN]
    row = found(blind, "lost")
    assert row["down_after_seconds"] is row["back_after_seconds"] is None


def test_every_scrape_belongs_to_one_phase() -> None:
    by_name = phases(PLANNED, SEEN)
    assert [*by_name] == ["before", "blocked", "after blocked", "lost", "after lost", "unloaded", "after unloaded"]
    assert [scrape for scrapes in by_name.values() for scrape in scrapes] == SEEN


def test_a_body_is_checked_for_unexpected_series_and_nan() -> None:
    body = (
        'rankscope_gpu_up{gpu="1",uuid="GPU-1"} 0.0\n'
        'rankscope_gpu_xid_errors_total{gpu="1",uuid="GPU-1",xid="79"} 1.0\n'
        'rankscope_gpu_power_watts{gpu="1",uuid="GPU-1"} NaN\n'
    )
    seen = parse(body, 1.0, 0.004, os.getpid())
    assert seen.values[UP] == {1: 0}
    assert seen.others == {1: 1}
    assert seen.has_nan
    assert seen.threads >= 1
    assert not parse(body.replace("NaN", "70.0"), 1.0, 0.004, os.getpid()).has_nan


def short_run(first_fault: float) -> dict[str, Any]:
    """Run with an early first fault, or a later one if the exporter starts too slowly on a busy machine."""
    try:
        return measure(faults(first_fault, 9, 7), rest=7)
    except TimeoutError:
        return short_run(2 * first_fault)


def test_blocking_lost_and_unloaded_gpus_do_not_affect_the_others() -> None:
    figures = short_run(12)
    assert not figures["restarted"]
    assert figures["scrapes_with_nan"] == 0
    for row in figures["faults"].values():
        assert row["scrapes_while_down"] > 0
        assert row["series_while_down"] == 0
        assert row["others_down"] == 0
        assert row["decreases"] == 0
        assert abs(row["others_lost_busy_seconds"] or 0) < 0.2, "one sampling period and rounding of percents"
        assert row["lost_busy_seconds"] > -0.2, "no time is invented"
    assert blocking_device.tables(figures)
