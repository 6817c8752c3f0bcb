"""The recording that is made from Prometheus' answers."""

from __future__ import annotations

from typing import Any

from validation.gauntlet.recorder import is_right, right_labels, selectors, series_of
from validation.gauntlet.schedule import draw

SCRAPES = [100.0, 101.0, 102.0]
PLACE = {"job": "rankscope", "instance": "127.0.0.1:9", "run": "train"}


def answer(name: str, values: dict[float, str], **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, **PLACE, **labels}, "values": [list(pair) for pair in values.items()]}


def verdict(**labels: str) -> dict[str, Any]:
    return {"fired": True, "place_right": True, "cause_right": True, "labels": labels}


def test_the_rules_selectors_are_recorded_with_their_matchers() -> None:
    assert 'rankscope_rank_step_seconds_bucket{rank="0"}' in selectors()
    assert "rankscope_rank_phase_seconds_total" in selectors()
    assert not [selector for selector in selectors() if ":" in selector]


def test_a_scrape_without_the_series_stays_empty() -> None:
    found = [answer("rankscope_rank_up", {100.0: "1", 102.0: "0"}, rank="2")]
    assert series_of(found, SCRAPES) == {"rankscope_rank_up{}": {"2": [1.0, None, 0.0]}}


def test_timestamps_are_relative_to_the_first_scrape() -> None:
    found = [answer("rankscope_rank_start_timestamp_seconds", dict.fromkeys(SCRAPES, "40.5"), rank="0")]
    assert series_of(found, SCRAPES) == {"rankscope_rank_start_timestamp_seconds{}": {"0": [-59.5] * 3}}


def test_a_rank_of_a_new_job_continues_the_series_of_the_old_one() -> None:
    common = {"rank": "0", "group": "0-3", "uuid": "GPU-0", "torch_version": "2.13.0"}
    old = answer("rankscope_rank_info", {100.0: "1"}, pid="1", **common)
    new = answer("rankscope_rank_info", {102.0: "1"}, pid="2", **common)
    assert series_of([old, new], SCRAPES) == {'rankscope_rank_info{group="0-3",uuid="GPU-0"}': {"0": [1.0, None, 1.0]}}


def test_series_that_differ_in_a_label_stay_apart() -> None:
    found = [answer("rankscope_rank_gc_seconds_total", {100.0: n}, rank="0", generation=n) for n in "12"]
    assert len(series_of(found, SCRAPES)) == 2


def test_an_xid_of_an_earlier_run_is_left_out() -> None:
    name = "rankscope_gpu_xid_last_timestamp_seconds"
    assert series_of([answer(name, {102.0: "60"}, gpu="0", uuid="GPU-0", xid="48")], SCRAPES) == {}
    now = series_of([answer(name, {102.0: "101"}, gpu="0", uuid="GPU-0", xid="48")], SCRAPES)
    assert now == {f'{name}{{xid="48"}}': {"0": [None, None, 1.0]}}


def test_a_run_is_right_if_it_was_notified_rightly_and_without_a_false_alarm() -> None:
    notified = verdict(alertname="RankscopeRankLagging", rank="1", cause="forward")
    good = {"step_seconds": [0.1, 0.14], "verdicts": [notified], "false_alarms": []}
    assert is_right(good)
    assert is_right({**good, "verdicts": []})
    assert not is_right({**good, "false_alarms": [{"alertname": "RankscopeGpuLost"}]})
    assert not is_right({**good, "verdicts": [{**notified, "cause_right": False}]})
    assert not is_right({**good, "step_seconds": [None, None]})


def test_a_decoy_has_no_right_labels_and_a_fault_has_those_that_were_judged() -> None:
    assert right_labels(draw(["drift"], 1), {"verdicts": []}) == {}
    notified = verdict(alertname="RankscopeRankLagging", rank="1", cause="data_wait", severity="warning", node="vm")
    right = {"alertname": "RankscopeRankLagging", "rank": "1", "cause": "data_wait"}
    assert right_labels(draw(["f03_slow_loader"], 1), {"verdicts": [notified]}) == right


def test_the_rank_is_no_right_label_where_any_rank_may_be_named() -> None:
    notified = verdict(alertname="RankscopeRankStuck", rank="1", severity="critical")
    assert right_labels(draw(["f18_hang_inside"], 1), {"verdicts": [notified]}) == {"alertname": "RankscopeRankStuck"}
