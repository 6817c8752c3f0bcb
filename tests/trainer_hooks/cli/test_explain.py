"""`rankscope explain` on recorded faults of a job with four ranks, with a real Prometheus."""

from __future__ import annotations

import re
import time

import pytest
from tests.trainer_hooks.cli.explaining import HANGING, HEALTHY, LAGGING, OF_RANK_2, WITHOUT_ALERTS, XID, Explain

from rankscope.cli.explaining.command import parse_moment

FALLBACK = 'ALERTS{alertname="RankscopeCpuFallback",alertstate="firing",severity="critical",run="train",rank="%d"} 1\n'
CLOCK = 'group:rankscope_clock:info{run="train",group="%s",clock="%s"} 1\n'
PACE = 'run:rankscope_steps:rate{run="train"} %s\n'
PAUSE = """run:rankscope_stall:seconds{run="train"} 70
run:rankscope_pausing:seconds{run="train"} 64
run:rankscope_patience:seconds{run="train"} 150
"""
PAUSED = 'run:rankscope_pause:seconds{run="train"} %d\n'
STALL = """run:rankscope_stall:seconds{run="train"} %d
run:rankscope_stall:sampled{run="train"} %d
run:rankscope_patience:seconds{run="train"} 45
"""
"""A run that stands still, but not yet for so long that the rules wait for the end of it."""
IN_PHASES = "".join(
    f'rankscope_rank_phase_since_timestamp_seconds{{run="train",rank="{rank}",phase="{phase}"}} 1\n'
    for rank, phase in enumerate(("collective_wait", "data_wait", "collective_wait", "collective_wait"))
)
ON_DEVICE = "".join(
    f'rankscope_rank_phase_since_timestamp_seconds{{run="train",rank="{rank}",phase="device_wait"}} 1\n'
    f'rankscope_rank_group_collectives_total{{run="train",rank="{rank}",group="0-3"}} {70 - (rank == 2)}\n'
    for rank in range(4)
)
MOMENTS = {
    "healthy": HEALTHY,
    "by the device": HEALTHY + CLOCK % ("0-3", "device"),
    "by both": HEALTHY + CLOCK % ("0-1", "device") + CLOCK % ("2-3", "host"),
    "nothing": "",  # so that the loss begins at the next moment
    "too short for an alert": WITHOUT_ALERTS + PACE % "9",
    "too few steps for an alert": WITHOUT_ALERTS + PACE % "0.001",
    "lagging": LAGGING,
    "hanging": HANGING,
    "not yet firing": LAGGING.replace('alertstate="firing"', 'alertstate="pending"'),
    "xid": LAGGING + XID % ("2", OF_RANK_2) + XID % ("7", "GPU-of-another-run"),
    "many alerts": LAGGING + "".join(FALLBACK % rank for rank in range(5)),
    "loaders are slow": HEALTHY + 'run:rankscope_loss:ratio{run="train",cause="data"} 0.12\n' + PACE % "9",
    "stands still": HEALTHY + PAUSE,
    "unnamed work": re.sub(r'(run:rankscope_lost:ratio{cause="other".*}) .*', r"\1 0.93", HEALTHY),
    "short pauses": HEALTHY + PAUSED % 2,
    "rank 1 stands still": HEALTHY + STALL % (20, 18) + IN_PHASES,
    "rank 2 stands still, by its device": HEALTHY + STALL % (30, 28) + ON_DEVICE,
    "pauses for a checkpoint": HEALTHY + STALL % (30, 28) + 'run:rankscope_planned_patience:seconds{run="train"} 900\n',
    "long pauses": HEALTHY + PAUSED % 25,
    "pauses as usual": HEALTHY + STALL % (40, 38) + IN_PHASES,
    "its exporter diagnoses it": HEALTHY
    + STALL % (70, 68)
    + IN_PHASES
    + 'rankscope_run_judged_info{run="train",by="vm"} 1\n',
}


def test_json_has_rank_host_gpu_cause_and_share_in_one_line(explain_at: Explain) -> None:
    answer = explain_at.answer("lagging")
    named = {name: answer[name] for name in ("run", "rank", "host", "gpu", "cause", "alert", "firing")}
    alert = {"alert": "RankscopeRankZeroLagging", "firing": True}
    assert named == {"run": "train", "rank": "0", "host": "vm", "gpu": "0", "cause": "other", **alert}
    assert answer["share"] == pytest.approx(0.2565, abs=1e-4)


def test_the_evidence_is_the_recorded_series_that_were_compared(explain_at: Explain) -> None:
    evidence = explain_at.answer("lagging")["evidence"]
    compared = evidence["compared"]
    assert compared["rank:rankscope_wait:ratio"] == pytest.approx(0.0653, abs=1e-4)
    assert compared["group:rankscope_wait:reference"] == pytest.approx(0.3218, abs=1e-4)
    assert compared['rank:rankscope_blame:ratio{phase="other"}'] == pytest.approx(0.2617, abs=1e-4)
    assert evidence["lost"]["straggler"] == max(v for cause, v in evidence["lost"].items() if cause != "none")


def test_the_text_is_some_ten_lines_with_the_words_of_the_notification(explain_now: Explain) -> None:
    lines, text = explain_now.lines("lagging"), explain_now.text("lagging")
    assert re.match(r"train: 4 ranks on 1 node, 6\d% of the GPU time is useful compute, \d{4}-", lines[0])
    assert lines[2].split()[0] == "straggler"
    assert "Rank 0 (vm, GPU 0) slows down run train by 26%: extra work outside the model" in text
    assert "Rank 0 waits 6.5% of the time in collectives" in text
    assert lines[-1].strip().endswith("/docs/runbooks/RankscopeRankZeroLagging.md")
    assert len(lines) <= 12


def test_a_past_alert_is_shown_with_what_was_compared(explain_at: Explain) -> None:
    text = explain_at.text("lagging")
    assert "WARNING: RankscopeRankZeroLagging, rank 0, host vm, GPU 0, cause other, 26% of the GPU time" in text
    assert "It waits 6.5% of the time in collectives, the other ranks of its group 32%: a lag of 26%." in text
    assert "/docs/runbooks/RankscopeRankZeroLagging.md" in text


def test_a_hang_inhibits_the_alerts_that_it_inhibits_in_alertmanager(explain_now: Explain) -> None:
    answer = explain_now.answer("hanging")
    named = [answer[name] for name in ("alert", "rank", "gpu", "cause", "share", "severity")]
    assert named == ["RankscopeRankStuck", "2", "2", "other", 1.0, "critical"]
    assert answer["evidence"]["summary"] == "Run train hangs: Rank 2 (vm, GPU 2) is stuck in other"
    assert answer["others"] == []


def test_without_an_alert_it_shows_the_useful_compute(explain_at: Explain) -> None:
    lines, answer = explain_at.lines("healthy"), explain_at.answer("healthy")
    assert "84% of the GPU time is useful compute" in lines[0]
    assert lines[-1] == "No alert: no loss is large enough."
    assert [answer[name] for name in ("alert", "rank", "cause", "share")] == [None] * 4
    assert answer["evidence"]["lost"]["none"] > 0.8


def test_it_shows_the_clock_by_which_the_ranks_are_judged(explain_at: Explain) -> None:
    assert "4 ranks on 1 node, compared by the devices' clock, 84%" in explain_at.lines("by the device")[0]
    clocks = [explain_at.answer(moment)["clock"] for moment in ("by the device", "by both", "healthy")]
    assert clocks == ["device", "mixed", None]


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (
            "too short for an alert",
            "rank 0 slows down the run by 26%: extra work outside the model, for 0 s; it alerts after 60 s.",
        ),
        (
            "too few steps for an alert",
            "rank 0 slows down the run by 26%: extra work outside the model, for 20 min.",
        ),
        (
            "loaders are slow",
            "12% of the GPU time, more than usual, is lost to data, for 0 s; it alerts after 2 min.",
        ),
        ("stands still", "no rank has made progress for 70 s; it alerts after 2.5 min."),
        (
            "rank 1 stands still",
            "no rank has made progress for 20 s: rank 1 is in data_wait; it alerts after 45 s.",
        ),
        ("its exporter diagnoses it", "no rank has made progress for 70 s: rank 1 is in data_wait."),
        (
            "rank 2 stands still, by its device",
            "no rank has made progress for 30 s: rank 2 is in device_wait; it alerts after 45 s.",
        ),
    ],
)
def test_a_loss_without_an_alert_yet_is_shown_with_how_long_it_must_last(
    explain_now: Explain, moment: str, text: str
) -> None:
    assert explain_now.text(moment).endswith(f"No alert yet: {text}")


@pytest.mark.parametrize("moment", ["pauses for a checkpoint", "pauses as usual"])
def test_a_pause_that_is_usual_is_no_standstill(explain_now: Explain, moment: str) -> None:
    assert explain_now.answer(moment)["not_yet"] is None


def test_json_has_the_rank_and_the_phase_of_a_standstill(explain_now: Explain) -> None:
    not_yet = explain_now.answer("rank 1 stands still")["not_yet"]
    assert (not_yet["cause"], not_yet["rank"], not_yet["phase"]) == ("stall", "1", "data_wait")


def test_json_has_the_loss_that_does_not_alert_yet(explain_now: Explain) -> None:
    not_yet = explain_now.answer("loaders are slow")["not_yet"]
    assert not_yet == {"cause": "data", "rank": None, "share": 0.12, "lasts": 0.0, "alerts_after_seconds": 120.0}
    assert explain_now.answer("healthy")["not_yet"] is None
    assert explain_now.answer("lagging")["not_yet"] is None


def test_time_outside_all_phases_is_shown_with_how_to_name_it(explain_at: Explain) -> None:
    text = explain_at.text("unnamed work")
    assert "But 93% of the time is outside data loading" in text
    assert re.search(r"First run rankscope stacks --rank 0 .* \(get_batch\(\)\) in rankscope\.phase\(", text)
    assert "outside data loading" not in explain_at.text("healthy")


def test_a_pending_alert_is_shown_as_not_notified_yet(explain_at: Explain) -> None:
    assert "PENDING, no notification yet: RankscopeRankZeroLagging" in explain_at.text("not yet firing")
    assert explain_at.answer("not yet firing")["firing"] is False


def test_an_alert_about_a_gpu_belongs_to_the_run_whose_rank_is_on_it(explain_at: Explain) -> None:
    answer = explain_at.answer("xid")
    assert [answer[name] for name in ("alert", "gpu", "host", "cause")] == ["RankscopeGpuXid", "2", "vm", "xid 79"]
    assert [other["alertname"] for other in answer["others"]] == ["RankscopeRankZeroLagging"]


def test_three_other_alerts_have_a_line_each_and_the_rest_is_counted(explain_at: Explain) -> None:
    lines = explain_at.lines("many alerts")
    assert any(line.startswith("CRITICAL: RankscopeCpuFallback, rank 0") for line in lines)
    assert lines[-4:] == [
        *(f"Also: RankscopeCpuFallback, rank {n}" for n in (1, 2, 3)),
        "And 2 more alerts: see --json.",
    ]
    assert len(explain_at.answer("many alerts")["others"]) == 5


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
