"""`rankscope explain` on the findings of a job with four ranks, with a real Prometheus."""

from __future__ import annotations

import re
import time

import pytest
from tests.trainer_hooks.cli.explaining import (
    EVIDENCE,
    HANGING,
    HEALTHY,
    LAGGING,
    OF_RANK_2,
    THROTTLED,
    XID,
    Explain,
    alert,
    finding,
    losses,
    ranks,
    series,
)

from rankscope.cli.explaining.command import parse_moment

DATA = {"kind": "data", "cause": "io", "rank": "", "group": "", "node": "", "gpu": "", "uuid": ""}
WAITS = finding("Run train waits for data 8% of the time, on every rank: loader workers wait", 0.08, "@-60", **DATA)
LOW = {**DATA, "kind": "low_utilization", "cause": "unknown"}
UNUSED = "Run train keeps its GPUs busy only 30% of the time: the reason is not known"
STARTING = "Run train has been starting for 10 min and has made no step"
ENDED = "rankscope_finding_end_timestamp_seconds"
IDLE = alert("RankscopeGpuAllocatedIdle", run="train", rank="2", gpu="2", node="vm", uuid=OF_RANK_2)


def end(seconds_ago: int, open_finding: str) -> str:
    """Return the end of a finding."""
    labels = re.search(r"rankscope_finding_ratio({.*})", open_finding)
    assert labels
    return f"{ENDED}{labels[1]} @-{seconds_ago}\n"


def shown_by(instance: str, text: str) -> str:
    """Return the series as another judge shows them, found by a scraper that adds the label `pod`."""
    return text.replace('instance="vm:10417"', f'instance="{instance}",pod="{instance}"')


def not_judged(reason: str, node: str = "") -> str:
    return series("rankscope_analyzer_run_not_judged_info", 1, reason=reason, node=node, instance="analyzer:10418")


def standing(*seconds: int, phase: str = "forward") -> str:
    """Return when each rank made progress, before the moment, and the phase that the first one is in."""
    return series("rankscope_rank_phase_since_timestamp_seconds", f"@-{seconds[0]}", rank=0, phase=phase) + "".join(
        series("rankscope_rank_last_progress_timestamp_seconds", f"@-{ago}", rank=rank)
        for rank, ago in enumerate(seconds)
    )


CRASH = {"kind": "crash", "cause": "killed", "severity": "critical", "rank": "1", "gpu": "1"}
MOMENTS = {
    "healthy": HEALTHY,
    "lagging": LAGGING,
    "standing still": HEALTHY + standing(70, 40, 55, 60),
    "one rank makes progress": HEALTHY + standing(70, 20, 55, 60),
    "evaluates": HEALTHY + standing(70, 40, 55, 60, phase="evaluation"),
    "standing still and another run": HEALTHY + standing(70, 40) + LAGGING.replace('run="train"', 'run="other"'),
    "hanging": HANGING + IDLE,
    "two findings and alerts": LAGGING + WAITS + XID + alert("RankscopeGpuXid", uuid="GPU-of-another-run", xid="48"),
    "an alert about the run": HEALTHY + alert("RankscopeDataBound", run="train") + alert("RankscopeOther", run="b"),
    "idle": HEALTHY + IDLE,
    "exporter down": HEALTHY + alert("RankscopeExporterDown", severity="warning"),
    "many findings": LAGGING + "".join(WAITS.replace('kind="data"', f'kind="data{n}"') for n in range(7)),
    "crash": ranks() + losses() + finding("Rank 1 (vm, GPU 1) of run train was killed", 1.0, "@-90", **CRASH),
    "two judges": LAGGING + shown_by("analyzer:10418", LAGGING),
    "smaller than when it was found": ranks() + losses(straggler=0.17) + finding(THROTTLED, 0.22),
    "less idle than when it was found": ranks() + losses() + finding(UNUSED, 0.6, **LOW),
    "starting for longer than when it was found": ranks() + losses() + finding(STARTING, 1.0, **LOW),
    "without texts": re.sub(r"(?m)^rankscope_finding_info.*\n", "", LAGGING),
    "has ended": LAGGING + WAITS + end(5, LAGGING),
    "has come again": LAGGING + end(800, LAGGING),
    "has become critical": LAGGING + LAGGING.replace('severity="warning"', 'severity="critical"'),
    "in its first steps": ranks(),
    "on two nodes": ranks() + ranks("vm2", 4),
    "on two nodes, with an analyzer": ranks() + ranks("vm2", 4) + not_judged("gpus_unknown"),
    "a node does not answer": HEALTHY + not_judged("node_missing", "vm2"),
    "over a limit": ranks() + series("rankscope_exporter_runs_not_judged", 2, run="", reason="too_many_runs"),
}


def test_the_text_is_some_ten_lines_with_the_words_of_the_finding(explain_at: Explain) -> None:
    first, *lines = explain_at.lines("lagging")
    assert re.fullmatch(
        r"train: 4 ranks on 1 node, 56% of its GPU time in the last seconds is useful compute, \d{4}-.*", first
    )
    assert lines == [
        "  lost in the last seconds to                share   GPU-hours so far",
        "  straggler (one is late, the others wait)    21%               1.68",
        "  transfer (every rank waits)                 10%               0.80",
        "  throttling                                 7.6%               0.61",
        "  other                                        5%               0.40",
        f"WARNING for 12 min: {THROTTLED}",
        f"  When it was found: {EVIDENCE}",
        "  Check its cooling and power.",
    ]


def test_without_a_finding_it_shows_the_largest_lag(explain_at: Explain) -> None:
    lines = explain_at.lines("healthy")
    assert "88% of its GPU time in the last seconds is useful compute" in lines[0]
    assert lines[-1] == "No problem found. The largest lag in the last seconds is 1.2% of the step, of rank 2."


def test_a_run_without_progress_is_not_said_to_be_right(explain_at: Explain) -> None:
    assert explain_at.lines("standing still")[-1] == "No finding yet: no progress for 40 s."
    assert explain_at.answer("standing still")["stalled_seconds"] == pytest.approx(40.0, abs=1.0)
    assert (
        explain_at.lines("standing still and another run")[-1] == "train, 4 ranks: no finding yet: no progress for 40 s"
    )
    for moment in ("one rank makes progress", "evaluates"):
        assert explain_at.lines(moment)[-1].startswith("No problem found.")
        assert explain_at.answer(moment)["stalled_seconds"] is None


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("smaller than when it was found", f"{THROTTLED} (22% now)"),
        ("less idle than when it was found", f"{UNUSED} (40% now)"),
        ("starting for longer than when it was found", f"{STARTING} (when it was found)"),
    ],
)
def test_the_present_number_follows_the_one_of_when_a_finding_began(
    explain_at: Explain, moment: str, words: str
) -> None:
    assert f"WARNING for 12 min: {words} When it was found: {EVIDENCE}" in explain_at.text(moment)


def test_a_hang_explains_the_other_findings_and_that_gpus_are_idle(explain_at: Explain) -> None:
    answer = explain_at.answer("hanging")
    assert [one["kind"] for one in answer["findings"]] == ["hang"]
    assert answer["alerts"] == []
    text = explain_at.text("hanging")
    assert "CRITICAL for 90 s: Run train hangs: Rank 1 (vm, GPU 1) is stuck in data_wait" in text


def test_other_findings_and_alerts_about_its_gpus_have_a_line_each(explain_at: Explain) -> None:
    lines = explain_at.lines("two findings and alerts")
    assert lines[-1] == (
        "Also WARNING for 60 s: Run train waits for data 8% of the time, on every rank: loader workers wait"
    )
    (alert,) = (i for i, line in enumerate(lines) if "alert" in line)
    assert lines[alert] == "CRITICAL alert RankscopeGpuXid: instance vm:10417, gpu 2, xid 79"
    assert lines[alert + 1].startswith("WARNING for 12 min: Rank 2")  # less than a critical alert


def test_a_crash_does_not_last(explain_at: Explain) -> None:
    assert "CRITICAL 90 s ago: Rank 1 (vm, GPU 1) of run train was killed" in explain_at.text("crash")


@pytest.mark.parametrize(
    ("moment", "alerts"),
    [
        ("an alert about the run", []),
        ("idle", ["RankscopeGpuAllocatedIdle"]),
        ("exporter down", ["RankscopeExporterDown"]),
    ],
)
def test_alerts_about_a_finding_are_not_shown_again(explain_at: Explain, moment: str, alerts: list[str]) -> None:
    assert [one["alertname"] for one in explain_at.answer(moment)["alerts"]] == alerts
    assert (" No other problem found." in explain_at.text(moment)) == bool(alerts)


def test_more_than_five_others_are_counted(explain_at: Explain) -> None:
    lines = explain_at.lines("many findings")
    assert sum(line.startswith("Also ") for line in lines) == 5
    assert lines[-1] == "And 2 more: see --json."
    assert len(explain_at.answer("many findings")["findings"]) == 8


def test_what_two_judges_show_is_shown_once(explain_at: Explain) -> None:
    assert explain_at.lines("two judges")[1:] == explain_at.lines("lagging")[1:]
    assert explain_at.answer("two judges")["ranks"] == 4


@pytest.mark.parametrize(
    ("moment", "kinds"),
    [
        ("has ended", [("data", "warning")]),
        ("has come again", [("straggler", "warning")]),
        ("has become critical", [("straggler", "critical")]),
    ],
)
def test_only_open_findings_are_shown_with_their_last_severity(
    explain_at: Explain, moment: str, kinds: list[tuple[str, str]]
) -> None:
    assert [(one["kind"], one["severity"]) for one in explain_at.answer(moment)["findings"]] == kinds


def test_an_exporter_that_does_not_answer_counts_for_two_minutes(explain_at: Explain, moments: dict[str, int]) -> None:
    at = moments["lagging"]
    answer = explain_at.answer("lagging", "--at", str(at + 110))
    assert (answer["ranks"], answer["findings"][0]["summary"]) == (4, THROTTLED)
    assert "had no run then" in explain_at.error("lagging", "--at", str(at + 130))


def test_without_words_a_finding_is_shown_by_its_labels(explain_at: Explain) -> None:
    words = "kind straggler, cause throttled, rank 2, node vm, gpu 2"
    assert explain_at.lines("without texts")[-1] == f"WARNING for 12 min: {words}"


def test_json_has_the_findings_with_their_labels_numbers_and_words_in_one_line(
    explain_at: Explain, moments: dict[str, int]
) -> None:
    answer = explain_at.answer("lagging")
    (found,) = answer["findings"]
    place = {"rank": "2", "group": "0-3", "node": "vm", "gpu": "2", "uuid": OF_RANK_2, "port": "", "place": ""}
    named = {"kind": "straggler", "cause": "throttled", "severity": "warning", **place}
    words = {"summary": THROTTLED, "evidence": EVIDENCE, "advice": "Check its cooling and power."}
    assert found == {**named, **words, "ratio": 0.28, "since": moments["lagging"] - 720}
    assert answer["lost"]["straggler"] == 0.21
    assert answer["lost_gpu_hours"]["straggler"] == pytest.approx(1.68)
    assert (answer["run"], answer["cluster"], answer["judged"], answer["not_judged"]) == ("train", None, True, [])


def test_json_has_the_largest_lag(explain_at: Explain) -> None:
    assert explain_at.answer("healthy")["largest_lag"] == {"rank": "2", "ratio": 0.012}
    assert explain_at.answer("in its first steps")["largest_lag"] is None


ANALYZER = "A run on several nodes needs an analyzer: rankscope-exporter --analyze TARGETS."


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        ("in its first steps", f"Not diagnosed yet: the diagnosis needs some steps. {ANALYZER}"),
        ("on two nodes", f"Not diagnosed. {ANALYZER}"),
        ("on two nodes, with an analyzer", "Not diagnosed: gpus unknown."),
        ("over a limit", "Not diagnosed: too many runs."),
        ("a node does not answer", "Not fully diagnosed: node vm2 does not answer."),
    ],
)
def test_it_says_why_a_run_is_not_diagnosed(explain_at: Explain, moment: str, text: str) -> None:
    assert explain_at.text(moment).endswith(text)


def test_a_moment_in_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--at 4102444800 is in the future$"):
        parse_moment("4102444800")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1795283699.5", 1795283699.5),
        ("2026-11-21T17:54:59Z", 1795283699),
        ("2026-11-21T18:54:59+01:00", 1795283699),
    ],
)
def test_a_moment_is_unix_seconds_or_an_iso_time(text: str, seconds: float) -> None:
    assert parse_moment(text) == seconds


def test_a_duration_is_that_long_ago() -> None:
    before = time.time()
    assert before - 1800 <= parse_moment("30m") <= time.time() - 1800
    assert parse_moment("2h") < parse_moment("1h")
