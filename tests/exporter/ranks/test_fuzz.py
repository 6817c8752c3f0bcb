"""Rank files that no hook has written: thousands of damaged files, and records of arbitrary JSON."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily
from testing.records import rank_info
from validation.fuzz.fuzzing import FuzzError
from validation.fuzz.rank_files import check, run, scrape

from rankscope.record import layout, reader
from rankscope.record.layout import INDEX
from rankscope_exporter.ranks import run_directory
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.run_directory import RunDirectory

TEXTS = st.text(max_size=220)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=10,
)
BY_TRACKER = st.dictionaries(st.sampled_from(layout.TRACKERS), TEXTS | JSON)
INFOS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys((*LABELS, "phases", "probes_disabled"), TEXTS | JSON)
    | dict.fromkeys(("tracker_ids", "tracker_urls"), BY_TRACKER | JSON),
)
SLOTS = st.dictionaries(st.integers(0, layout.SLOTS - 1), st.floats() | st.integers(0, 2**53).map(float), max_size=8)


def made(info: dict[str, Any], slots: dict[int, float]) -> bytes:
    text = json.dumps(rank_info(probes_disabled=[]) | info).encode()[: layout.INFO_CAPACITY]
    values = [0.0] * layout.SLOTS
    values[INDEX["info_place"]] = float(len(text))
    for index, value in slots.items():
        values[index] = value
    data = layout.header().ljust(layout.SLOTS_OFFSET, b"\0") + struct.pack(f"{layout.SLOTS}d", *values)
    return (data.ljust(layout.INFO_OFFSET, b"\0") + text).ljust(layout.SIZE, b"\0")


def test_damaged_files_do_not_stop_a_scrape_or_expose_bad_labels(run_dir: Path) -> None:
    outcome = run(run_dir, seed=2, first=0, files=4000)
    assert outcome.total() <= 4000
    assert outcome["shown"] > 400  # damage that passes the checks is also tested
    assert outcome["foreign"] > 400


# All examples use the same directory: each overwrites the previous file.
@settings(max_examples=300)
@given(info=INFOS, slots=SLOTS)
def test_arbitrary_records_make_only_valid_metrics(
    run_dir: Path, info: dict[str, Any], slots: dict[int, float]
) -> None:
    (run_dir / "made.rank").write_bytes(made(info, slots))
    shown, skipped = scrape(RunDirectory([run_dir], clock=lambda: 0.0), parse=True)
    assert shown + skipped.total() <= 1


@settings(max_examples=100)
@given(data=st.binary(max_size=300).map(lambda junk: layout.header() + junk) | st.binary(max_size=300))
def test_arbitrary_bytes_are_not_read_as_a_record(run_dir: Path, data: bytes) -> None:
    (run_dir / "made.rank").write_bytes(data)
    shown, skipped = scrape(RunDirectory([run_dir]), parse=False)
    assert (shown, skipped.total()) == (0, 1)


MISSING = {
    "future starts": (run_directory, "check_time", lambda *_: None),
    "labels": (run_directory, "check_info", lambda _: None),
    "numbers": (reader, "LARGEST", math.inf),
    "whole buckets": (reader, "_BUCKETS", slice(0, 0)),
    "nested brackets": (reader, "RecursionError", ZeroDivisionError),
}


@pytest.mark.parametrize("check", MISSING)
def test_the_fuzzer_detects_a_missing_check(check: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISSING[check], raising=False)
    with pytest.raises(FuzzError, match=r"seed 2, file \d+"):
        run(run_dir, seed=2, first=0, files=2000, parsed_every=1)


@pytest.mark.parametrize(
    ("label", "value"), [("a\nb", 1.0), ("x" * 201, 1.0), ("a", math.nan), ("a", math.inf), ("a", -1.0)]
)
def test_invalid_metrics_are_detected(label: str, value: float) -> None:
    family = GaugeMetricFamily("rankscope_rank_up", "Up.", labels=["run"])
    family.add_metric([label], value)
    with pytest.raises(FuzzError):
        check([family])


def test_a_duplicate_series_is_detected() -> None:
    family = GaugeMetricFamily("rankscope_rank_up", "Up.", labels=["run"])
    for _ in range(2):
        family.add_metric(["r"], 1)
    with pytest.raises(FuzzError, match="twice"):
        check([family])
