"""Recordings: writing, reading, and stretching to production speed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from testing import promtool
from testing.recording import RECORDED, Recording, Values
from testing.replay import QUIET, REPEATED, series, timed

HEALTHY, CHANGING = 5, 3
SCRAPES = HEALTHY + CHANGING + REPEATED
COUNTER, GAUGE = "rankscope_rank_steps_total{}", "rankscope_rank_up{}"
TIMESTAMP = "rankscope_rank_start_timestamp_seconds{}"


def recording(name: str, values: Values) -> Recording:
    return Recording("f99_test/1.4/1", {}, HEALTHY, SCRAPES, {name: {"2": values}})


def replayed(name: str, values: Values, faulty: int = 3) -> list[str]:
    (only,) = series(recording(name, values), faulty)
    return only["values"].split(" ")


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    gauge: Values = [1.0, 1.0, None, None, 0.0, 1.0, None, 2.0]
    counter: Values = [1.25, 2.5, 3.75, 5.0, None, 1.0, 1.0, 1.0]
    series = {GAUGE: {"0": gauge, "1": gauge}, COUNTER: {"0": counter}, TIMESTAMP: {"0": [-60.5] * 4 + [3.5] * 4}}
    written = Recording("f99_test/1.4/1", {"alertname": "RankscopeTest", "rank": "1"}, HEALTHY, SCRAPES, series)
    written.write(tmp_path)
    assert Recording.read(tmp_path / "f99_test.json") == written


def test_equal_series_of_several_ranks_are_written_once(tmp_path: Path) -> None:
    Recording("f99_test/1.4/1", {}, HEALTHY, SCRAPES, {GAUGE: {"0": [1.0] * SCRAPES, "1": [1.0] * SCRAPES}}).write(
        tmp_path
    )
    assert '"0 1": "1x20"' in (tmp_path / "f99_test.json").read_text()


def test_counters_keep_their_rate_through_all_repetitions() -> None:
    values = [float(value) for value in replayed(COUNTER, [0, 2, 4, 6, *range(8, 8 + SCRAPES)], faulty=50)]
    growth = [after - before for before, after in pairwise(values)]
    assert growth == [30.0] * (QUIET - 1) + [15.0] * 50


def test_a_counter_restarts_with_its_process() -> None:
    assert replayed(COUNTER, [10, 11, 12, 13, 14, *range(2, SCRAPES)])[QUIET:] == ["30", "45", "60"]


def test_gauges_keep_their_values() -> None:
    assert replayed(GAUGE, [1] * HEALTHY + [0, 3, 5])[QUIET:] == ["0", "3", "5"]


def test_a_time_that_is_updated_keeps_its_age() -> None:
    values = replayed(TIMESTAMP, [when - 1 for when in range(SCRAPES)], faulty=50)
    assert [15 * scrape - float(value) for scrape, value in enumerate(values)] == [15.0] * len(values)


def test_a_time_that_stays_grows_older() -> None:
    values = replayed(TIMESTAMP, [-4] * HEALTHY + [HEALTHY] * SCRAPES, faulty=50)
    assert set(values[:QUIET]) == {str(-15 * 5)}  # the first replayed scrape is the second recorded one
    assert set(values[QUIET:]) == {str(15 * QUIET)}  # at the onset


def test_a_series_that_ends_is_stale_at_once_and_stays_so() -> None:
    assert replayed(GAUGE, [1] * HEALTHY + [None] * SCRAPES, faulty=50)[QUIET:] == ["stale", *["_"] * 49]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("rankscope_rank_up{}", {"run", "rank"}),
        ('rankscope_rank_info{group="0-3",uuid="GPU-0"}', {"run", "rank", "node", "group", "uuid"}),
        ("rankscope_gpu_up{}", {"gpu", "uuid"}),
        ("rankscope_exporter_gpus_seen{}", set()),
    ],
)
def test_every_series_belongs_to_the_case(name: str, labels: set[str]) -> None:
    (only,) = series(recording(name, [1.0] * SCRAPES), 3)
    pairs = only["series"].partition("{")[2].rstrip("}").split(",")
    assert {pair.partition("=")[0] for pair in pairs} == {"job", "instance"} | labels
    assert all("f99_test" in pair for pair in pairs if pair.startswith(("instance", "run", "node", "uuid")))


def test_a_loss_alerts_as_soon_if_scrapes_are_long_before_the_evaluation(tmp_path: Path) -> None:
    # Scrapes are 1 s after one evaluation and 14 s before the next; the last progress was 2 s before the scrape.
    speed = promtool.PRODUCTION
    (test,) = timed([Recording.read(RECORDED / "f09_rank_zero_works.json")], speed)
    for line in test["input_series"]:
        values = promtool.expanded(line["values"])
        if "last_progress" in line["series"]:
            values = [str(speed.interval * scrape - 1) for scrape in range(len(values))]
        line["values"] = " ".join(f"_ {value} _x13" for value in values)
    first = 'count(max_over_time(rank:rankscope_lag:tier{tier="1"}[20m]))'
    test |= {
        "interval": "1s",
        "promql_expr_test": [{"expr": first, "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 1}]}],
    }
    assert promtool.complaint(test, speed, tmp_path / "test.yml") == ""
