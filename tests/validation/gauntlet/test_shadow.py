"""The gauntlet's page shows each difference between the rules' alerts and the exporter's findings."""

from __future__ import annotations

import pytest
from validation.gauntlet import report
from validation.gauntlet.case import Target
from validation.gauntlet.cases import all_cases
from validation.gauntlet.score import Verdict
from validation.gauntlet.shadow import differences, findings, scored

SLOW_LOADER = all_cases()["f03_slow_loader"]
ONSET = 1000.0
LAGGING = {"alertname": "RankscopeRankLagging", "rank": "2", "cause": "data_wait"}
BY_RANK_ONE = {"alertname": "RankscopeRankLagging", "rank": "1", "cause": "data_wait"}
THROTTLED = {"alertname": "RankscopeThrottled", "cause": "throttled"}
XID = {"alertname": "RankscopeGpuXid", "gpu": "2"}


def verdict(labels, place_right=True):
    if labels is None:
        return Verdict(fired=False).line()
    return Verdict(True, place_right, True, 7.0, labels).line()


def a_line(rules, exporter, false_alarms=(), exporters_false_alarms=()):
    findings = {"verdicts": [exporter], "false_alarms": list(exporters_false_alarms)}
    line = {"case": "f03_slow_loader", "title": "one slow loader", "dose": 1.4, "seed": 101, "kind": "fault"}
    line |= {"simulated": "", "resolved": True, "false_alarms": list(false_alarms)}
    return line | {"verdicts": [rules], "findings": findings}


@pytest.mark.parametrize(
    ("rules", "exporter", "right"),
    [
        (verdict(LAGGING), verdict(None), "rules"),
        (verdict(None), verdict(LAGGING), "exporter"),
        (verdict(BY_RANK_ONE, place_right=False), verdict(LAGGING), "exporter"),
        (verdict(BY_RANK_ONE, place_right=False), verdict(None), "neither"),
        (verdict(LAGGING), verdict({**LAGGING, "cause": "other"}), "both"),
    ],
)
def test_another_rank_or_cause_or_no_alert_is_a_difference(rules, exporter, right):
    (found,) = differences(a_line(rules, exporter))
    assert (found.rules, found.exporter, found.right) == (rules["labels"], exporter["labels"], right)


def test_seconds_severity_and_a_cause_that_only_one_names_are_no_difference():
    finding = {"alertname": "RankscopeRankLagging", "rank": "2", "severity": "critical"}
    assert not differences(a_line(verdict(LAGGING), verdict(finding)))
    assert not differences(a_line(verdict(None), verdict(None)))


def test_an_alert_that_the_exporter_has_no_finding_for_is_not_compared():
    assert not differences(a_line(verdict(XID), verdict(None), [XID]))


def test_a_false_alarm_of_one_side_is_a_difference_and_one_of_both_is_not():
    both = [THROTTLED]
    (found,) = differences(a_line(verdict(LAGGING), verdict(LAGGING), both, [*both, BY_RANK_ONE]))
    assert found == (None, BY_RANK_ONE, "rules")
    (found,) = differences(a_line(verdict(LAGGING), verdict(LAGGING), both))
    assert found == (THROTTLED, None, "exporter")


def test_a_finding_in_another_place_is_compared_with_the_alert():
    labels = {"kind": "straggler", "rank": "1", "cause": "data_wait", "run": "train"}
    findings = scored([(labels, ONSET + 7)], [(SLOW_LOADER, Target(rank=2))], ONSET)
    line = a_line(verdict(LAGGING), findings["verdicts"][0], (), findings["false_alarms"])
    assert [one.right for one in differences(line)] == ["rules"]


def test_the_page_has_a_row_for_each_difference_or_says_that_there_is_none():
    same, other = (a_line(verdict(LAGGING), verdict(one)) for one in (LAGGING, None))
    assert report.body([same])[-1] == "No difference in 1 runs."
    row = "| `f03_slow_loader` | 101 | gloo | RankLagging, rank 2, cause data_wait | nothing | rules |"
    assert report.body([same, other | {"device": "gloo"}])[-1].splitlines()[2:] == [row]


def test_a_ledger_from_before_findings_were_recorded_has_no_comparison():
    line = a_line(verdict(LAGGING), verdict(LAGGING))
    del line["findings"]
    assert "findings" not in " ".join(report.body([line]))


class Answers:
    """A Prometheus with findings of these kinds since second 1005."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def query(self, _query):
        return [{"metric": {"kind": kind}, "values": [[1005, "0.3"], [1010, "0.3"]]} for kind in self.kinds]


def test_findings_with_an_alert_are_compared() -> None:
    found = findings(Answers("straggler", "data", "power_limited"), ONSET, ONSET + 20.0)
    assert found == [({"kind": "straggler"}, 1005.0), ({"kind": "data"}, 1005.0)]
