"""The checks of a soak, with made-up observations."""

from __future__ import annotations

import pytest
from validation.soak import checks, plan

ONSET, HEALED = 1000.0, 1300.0
LAGGING = {"alertname": "RankscopeRankLagging", "run": "gloo", "rank": "2", "cause": "data_wait", "severity": "warning"}
DOWN = {"alertname": "RankscopeExporterDown", "instance": "a:1"}


def notified(received, labels=LAGGING, status="firing"):
    return {"received": received, "labels": labels, "status": status}


def fault(**changes):
    known = {"run": "gloo", "name": "f03_slow_loader", "title": "one slow loader", "place": {"rank": "2"}}
    return checks.InjectedFault(**{**known, "onset": ONSET, "healed": HEALED, **changes})


def assigned(*notifications):
    faults = [fault()]
    return faults, checks.assign(faults, notifications)


def chaos(act=plan.KILL, target=plan.PROMETHEUS, run="", began=1100.0, ended=1120.0, firing=()):
    return {"act": act, "target": target, "run": run, "began": began, "ended": ended, "firing": list(firing)}


def test_a_fault_with_one_message_and_one_resolve_is_right():
    faults, unexplained = assigned(notified(1120.0), notified(1600.0, status="resolved"))
    assert (faults[0].seconds, unexplained) == (120.0, [])
    assert checks.none_lost(faults).holds
    assert checks.none_notified_twice(faults).holds
    assert checks.none_resolved_early(faults).holds


def test_a_fault_without_a_notification_is_lost():
    faults, _ = assigned()
    assert checks.none_lost(faults).found == "one slow loader of gloo"


def test_a_repeated_message_is_a_second_notification():
    faults, _ = assigned(notified(1120.0), notified(1200.0))
    assert checks.none_notified_twice(faults).found == "one slow loader of gloo: 2 messages (the same again)"


def test_a_message_with_another_severity_is_a_second_notification_and_the_difference_is_named():
    faults, _ = assigned(notified(1120.0), notified(1200.0, {**LAGGING, "severity": "critical"}))
    assert checks.none_notified_twice(faults).found == "one slow loader of gloo: 2 messages (differ in severity)"


def test_two_alerts_in_one_message_count_once():
    faults, unexplained = assigned(notified(1120.0), notified(1120.0, {**LAGGING, "cause": "io"}))
    assert checks.none_notified_twice(faults).holds
    assert unexplained == []


def test_a_resolve_message_may_list_what_still_fires():
    critical = {**LAGGING, "severity": "critical"}
    received = [notified(1120.0), notified(1120.0, critical), notified(1200.0), notified(1200.0, critical, "resolved")]
    assert [message.is_repeated for message in checks.firing_messages(received)] == [False]


def test_a_resolve_while_the_fault_lasts_is_wrong():
    faults, _ = assigned(notified(1120.0), notified(1200.0, status="resolved"))
    assert not checks.none_resolved_early(faults).holds


@pytest.mark.parametrize("other", [{"rank": "1"}, {"run": "asynchronous"}, {"alertname": "RankscopeRankStuck"}])
def test_an_alert_that_no_fault_explains_is_a_false_alarm(other):
    _, unexplained = assigned(notified(1120.0, {**LAGGING, **other}))
    assert not checks.no_false_alarms(unexplained, []).holds


def test_an_alert_long_after_healing_is_unexplained():
    _, unexplained = assigned(notified(HEALED + checks.LATE_NOTIFICATION + 1))
    assert len(unexplained) == 1


def test_an_alert_about_an_exporter_that_was_down_beyond_its_limit_is_right():
    _, unexplained = assigned(notified(1300.0, DOWN))
    assert not checks.no_false_alarms(unexplained, [chaos(target=plan.EXPORTER)]).holds
    assert checks.no_false_alarms(unexplained, [chaos(target=plan.EXPORTER, ended=1230.0)]).holds


@pytest.mark.parametrize(("until", "holds"), [(1400.0, True), (1105.0, False)])
def test_an_alert_that_fired_before_prometheus_was_down_fires_after_it(until, holds):
    spans = [(1090.0, 1105.0), (1150.0, until)] if holds else [(1090.0, until)]
    history = {"firing": [{"labels": LAGGING, "spans": spans}]}
    assert checks.alerts_survive(history, [chaos(firing=[LAGGING])], [fault()]).holds is holds


def test_an_alert_need_not_fire_on_if_its_fault_was_healed_meanwhile():
    healed = fault(healed=1130.0)
    assert checks.alerts_survive({"firing": []}, [chaos(firing=[LAGGING])], [healed]).holds


def fell(name, **labels):
    labels = {"__name__": name, "instance": "a:1", **labels}
    return {"labels": labels, "before": 1100.0, "after": 1130.0, "was": 9.0, "is": 1.0}


def counters(fall, starts=(), disturbances=()):
    history = {"falls": [fall], "starts": list(starts), "counters": 1, "samples": 9}
    return checks.counters_only_grow(history, disturbances, {"gloo": "a:1", "asynchronous": "b:1"})


@pytest.mark.parametrize(("run", "holds"), [("gloo", True), ("asynchronous", False)])
def test_a_counter_of_the_exporter_may_restart_only_with_that_exporter(run, holds):
    restart = chaos(target=plan.EXPORTER, run=run)
    assert counters(fell("rankscope_gpu_energy_joules_total"), disturbances=[restart]).holds is holds


@pytest.mark.parametrize(("seen", "holds"), [(1130.0, True), (1145.0, False)])
def test_a_counter_of_a_rank_may_restart_only_with_that_rank(seen, holds):
    start = {"labels": {"run": "gloo", "rank": "2"}, "changes": [(1000.0, 1.0), (seen, 2.0)]}
    restart = chaos(target=plan.EXPORTER, run="gloo")
    fall = fell("rankscope_rank_steps_total", run="gloo", rank="2")
    assert counters(fall, [start], [restart]).holds is holds


def memory_samples(growth, minutes=60):
    """Return an exporter's memory each minute: a warm-up, then `growth` bytes an hour."""
    return [
        {"server": "exporter of gloo", "pid": 7, "time": 60.0 * m, "bytes": 5e7 + (m > 5) * 1e7 + growth * m / 60}
        for m in range(minutes)
    ]


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (1e6, True), (5e6, False)])
def test_memory_may_grow_only_during_warm_up(growth, holds):
    assert checks.memory_is_flat(memory_samples(growth)).holds is holds


def test_a_process_that_lived_for_minutes_proves_nothing():
    assert not checks.memory_is_flat(memory_samples(0, minutes=15)).holds
