"""What a soak must show, of made-up observations."""

from __future__ import annotations

import pytest
from validation.soak import checks, plan

ONSET, HEALED = 1000.0, 1300.0
LAGGING = {"alertname": "RankscopeRankLagging", "run": "gloo", "rank": "2", "cause": "data_wait", "severity": "warning"}
DOWN = {"alertname": "RankscopeExporterDown", "instance": "a:1"}


def said(received, labels=LAGGING, status="firing"):
    return {"received": received, "labels": labels, "status": status}


def story(**changes):
    known = {"run": "gloo", "name": "f03_slow_loader", "title": "one slow loader", "place": {"rank": "2"}}
    return checks.Story(**{**known, "onset": ONSET, "healed": HEALED, **changes})


def after(*told):
    faults = [story()]
    return faults, checks.assign(faults, told)


def chaos(act=plan.KILL, target=plan.PROMETHEUS, run="", began=1100.0, ended=1120.0, firing=()):
    return {"act": act, "target": target, "run": run, "began": began, "ended": ended, "firing": list(firing)}


def test_a_fault_that_is_told_once_and_whose_end_is_told_once_is_right():
    faults, strange = after(said(1120.0), said(1600.0, status="resolved"))
    assert (faults[0].seconds, strange) == (120.0, [])
    assert checks.none_lost(faults).holds
    assert checks.none_told_twice(faults).holds
    assert checks.none_ended_early(faults).holds


def test_a_fault_of_which_nothing_is_told_is_lost():
    faults, _ = after()
    assert checks.none_lost(faults).found == "one slow loader of gloo"


def test_the_same_again_is_told_twice():
    faults, _ = after(said(1120.0), said(1200.0))
    assert checks.none_told_twice(faults).found == "one slow loader of gloo: 2 messages (the same again)"


def test_another_severity_or_cause_is_told_twice_and_named():
    faults, _ = after(said(1120.0), said(1200.0, {**LAGGING, "severity": "critical"}))
    assert checks.none_told_twice(faults).found == "one slow loader of gloo: 2 messages (differ in severity)"


def test_two_alerts_of_one_message_wake_a_person_once():
    faults, strange = after(said(1120.0), said(1120.0, {**LAGGING, "cause": "io"}))
    assert checks.none_told_twice(faults).holds
    assert strange == []


def test_a_message_about_an_end_may_list_what_still_fires():
    critical = {**LAGGING, "severity": "critical"}
    told = [said(1120.0), said(1120.0, critical), said(1200.0), said(1200.0, critical, "resolved")]
    assert [telling.is_repeated for telling in checks.tellings(told)] == [False]


def test_an_end_that_is_told_while_the_fault_holds_is_wrong():
    faults, _ = after(said(1120.0), said(1200.0, status="resolved"))
    assert not checks.none_ended_early(faults).holds


@pytest.mark.parametrize("other", [{"rank": "1"}, {"run": "asynchronous"}, {"alertname": "RankscopeRankStuck"}])
def test_what_no_fault_explains_is_a_false_alarm(other):
    _, strange = after(said(1120.0, {**LAGGING, **other}))
    assert not checks.no_false_alarms(strange, []).holds


def test_what_is_told_long_after_healing_tells_nothing():
    _, strange = after(said(HEALED + checks.TOLD_LATE + 1))
    assert len(strange) == 1


def test_an_exporter_that_was_down_for_longer_than_its_limit_is_told_rightly():
    _, strange = after(said(1300.0, DOWN))
    assert not checks.no_false_alarms(strange, [chaos(target=plan.EXPORTER)]).holds
    assert checks.no_false_alarms(strange, [chaos(target=plan.EXPORTER, ended=1230.0)]).holds


@pytest.mark.parametrize(("until", "holds"), [(1400.0, True), (1105.0, False)])
def test_what_fired_before_prometheus_was_down_fires_after_it(until, holds):
    spans = [(1090.0, 1105.0), (1150.0, until)] if holds else [(1090.0, until)]
    history = {"firing": [{"labels": LAGGING, "spans": spans}]}
    assert checks.alerts_survive(history, [chaos(firing=[LAGGING])], [story()]).holds is holds


def test_an_alert_whose_fault_was_healed_meanwhile_need_not_fire_on():
    healed = story(healed=1130.0)
    assert checks.alerts_survive({"firing": []}, [chaos(firing=[LAGGING])], [healed]).holds


def fell(name, **labels):
    labels = {"__name__": name, "instance": "a:1", **labels}
    return {"labels": labels, "before": 1100.0, "after": 1130.0, "was": 9.0, "is": 1.0}


def counters(fall, starts=(), disturbances=()):
    history = {"falls": [fall], "starts": list(starts), "counters": 1, "samples": 9}
    return checks.counters_only_grow(history, disturbances, {"gloo": "a:1", "asynchronous": "b:1"})


@pytest.mark.parametrize(("run", "holds"), [("gloo", True), ("asynchronous", False)])
def test_what_an_exporter_counts_may_begin_anew_with_that_exporter(run, holds):
    restart = chaos(target=plan.EXPORTER, run=run)
    assert counters(fell("rankscope_gpu_energy_joules_total"), disturbances=[restart]).holds is holds


@pytest.mark.parametrize(("seen", "holds"), [(1130.0, True), (1145.0, False)])
def test_what_a_rank_counts_may_begin_anew_with_that_rank_and_not_with_the_exporter(seen, holds):
    start = {"labels": {"run": "gloo", "rank": "2"}, "changes": [(1000.0, 1.0), (seen, 2.0)]}
    restart = chaos(target=plan.EXPORTER, run="gloo")
    fall = fell("rankscope_rank_steps_total", run="gloo", rank="2")
    assert counters(fall, [start], [restart]).holds is holds


def remembered(growth, minutes=60):
    """An exporter's memory, each minute: what it takes up first, and then so many bytes an hour."""
    return [
        {"server": "exporter of gloo", "pid": 7, "time": 60.0 * m, "bytes": 5e7 + (m > 5) * 1e7 + growth * m / 60}
        for m in range(minutes)
    ]


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (1e6, True), (5e6, False)])
def test_memory_may_grow_at_the_begin_only(growth, holds):
    assert checks.memory_is_flat(remembered(growth)).holds is holds


def test_of_a_process_that_lived_for_minutes_nothing_is_known():
    assert not checks.memory_is_flat(remembered(0, minutes=15)).holds
