"""Notifications are scored against the injected faults."""

from __future__ import annotations

from testing.webhook import Notification
from validation.gauntlet.case import Target
from validation.gauntlet.cases import all_cases
from validation.gauntlet.score import false_alarms, judge

SLOW_LOADER = all_cases()["f03_slow_loader"]
HELD = all_cases()["f07_memory_held"]
RANK_2 = Target(rank=2)
ONSET = 1000.0


def notified(name, after=12.0, status="firing", **labels):
    return Notification(status, {"alertname": name, **labels}, {}, "", ONSET + after)


def lagging(after=12.0, rank="2", cause="data_wait"):
    return notified("RankscopeRankLagging", after, rank=rank, cause=cause)


def test_a_fault_that_is_named_with_its_rank_and_cause_is_right():
    verdict = judge(SLOW_LOADER, RANK_2, ONSET, [lagging()])
    assert (verdict.fired, verdict.place_right, verdict.cause_right, verdict.seconds) == (True, True, True, 12.0)


def test_another_rank_is_the_wrong_place_and_another_phase_is_the_wrong_cause():
    assert not judge(SLOW_LOADER, RANK_2, ONSET, [lagging(rank="1")]).place_right
    assert not judge(SLOW_LOADER, RANK_2, ONSET, [lagging(cause="unknown")]).cause_right


def test_only_the_first_alert_about_a_fault_counts():
    verdict = judge(SLOW_LOADER, RANK_2, ONSET, [lagging(10.0, cause="unknown"), lagging(15.0)])
    assert (verdict.cause_right, verdict.seconds) == (False, 10.0)


def test_alerts_before_the_onset_and_resolves_do_not_count():
    silence = [lagging(after=-1.0), notified("RankscopeRankLagging", status="resolved", rank="2", cause="data_wait")]
    assert not judge(SLOW_LOADER, RANK_2, ONSET, silence).fired


def test_an_alert_whose_name_is_its_cause_needs_no_label():
    verdict = judge(HELD, Target(spare_gpu=5), ONSET, [notified("RankscopeGpuMemoryHeldIdle", gpu="5")])
    assert verdict.place_right
    assert verdict.cause_right


def test_an_alert_about_no_fault_is_one_false_alarm_however_often_it_is_repeated():
    idle = notified("RankscopeGpuAllocatedIdle", rank="1")
    assert false_alarms([(SLOW_LOADER, RANK_2), (HELD, RANK_2)], [lagging(), idle, idle]) == [idle.labels]


def test_a_second_rank_in_an_alert_is_a_false_alarm():
    first, second = lagging(), lagging(14.0, rank="1")
    assert false_alarms([(SLOW_LOADER, RANK_2)], [first, second]) == [second.labels]


def test_every_alert_during_a_decoy_is_a_false_alarm():
    assert false_alarms([(all_cases()["drift"], RANK_2)], [lagging()]) == [lagging().labels]
