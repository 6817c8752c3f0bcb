"""What the dashboard *Run* says of runs that are well, dead or not seen, by clocks right and wrong; promtool asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from testing import promtool
from testing.promtool import PRODUCTION, complaint
from tests.rules.diagnosis_cases import CASES

from rankscope_dashboards.queries import panel_queries

INTERVAL = PRODUCTION.interval
NOW, RANGE = 2400, "20m"
EVER = range(0, NOW + 1, INTERVAL)
SHOWN_FOR = 600  # seconds that an exporter shows a rank after its end
CHECKPOINT = NOW - 300
LAGGING = "Holds the others up"

WAITS = (0.125, 0.15625)  # of the two ranks, in collectives

Run = dict[str, dict[int, float]]
"""The values of each series by time."""
Samples = Mapping[str, float]
"""Values by their labels, as promtool wants them."""


def life(
    begins: int = 0,
    ends: int = NOW + INTERVAL,
    reasons: tuple[str, str] | None = None,
    moves_until: int = NOW,
    ahead: int = 0,
) -> Run:
    """A run of two ranks; with `reasons` they are shown after their end. Its exporter's clock may be `ahead`."""
    alive = range(begins, ends, INTERVAL)
    ended = range(ends, min(ends + SHOWN_FOR, NOW + 1), INTERVAL) if reasons else ()
    shown = (*alive, *ended)
    moved = {time: float(min(time, moves_until)) for time in alive}
    found: Run = {"rankscope_exporter_time_seconds{": {time: time + ahead for time in EVER}}
    for rank, waits in enumerate(WAITS):
        common = f'rank="{rank}"'
        found |= {
            f'rankscope_rank_info{{{common},group="0-1"': dict.fromkeys(shown, 1),
            f"rankscope_rank_up{{{common}": dict.fromkeys(ended, 0.0) | dict.fromkeys(alive, 1.0),
            f"rankscope_rank_start_timestamp_seconds{{{common}": dict.fromkeys(shown, begins + ahead),
            f"rankscope_rank_last_progress_timestamp_seconds{{{common}": {t: at + ahead for t, at in moved.items()},
            f'rankscope_rank_phase_since_timestamp_seconds{{{common},phase="forward"': dict.fromkeys(
                alive, moves_until - 60 + ahead
            ),
            f"rankscope_rank_checkpoint_last_timestamp_seconds{{{common}": dict.fromkeys(alive, CHECKPOINT + ahead),
            f"rankscope_rank_checkpoints_total{{{common}": dict.fromkeys(alive, 1),
            f"rankscope_rank_steps_total{{{common}": moved,
            f'rankscope_rank_phase_seconds_total{{{common},phase="collective_wait"': {t: t * waits for t in alive},
            f'rankscope_rank_phase_seconds_total{{{common},phase="forward"': {t: t * (1 - waits) for t in alive},
        }
        if reasons:
            found[f'rankscope_rank_exit_info{{{common},reason="{reasons[rank]}"'] = dict.fromkeys(ended, 1)
            found[f"rankscope_rank_exit_timestamp_seconds{{{common}"] = dict.fromkeys(ended, ends + ahead)
    return found


def one_after_the_other(first: Run, second: Run) -> Run:
    """A run that was started anew."""
    both: Run = defaultdict(dict)
    for series, values in (*first.items(), *second.items()):
        both[series] |= values
    return both


def judged(run: Run, kind: str = "", labels: str = "", ratio: float = 0.0, since: int = 0) -> Run:
    """The same run with what its exporter says of it."""
    found = {
        'rankscope_run_judged_info{by="node-a"': dict.fromkeys(EVER, 1.0),
        'rankscope_rank_lag_ratio{rank="0"': dict.fromkeys(EVER, 0.5 * LAG),
        'rankscope_rank_lag_ratio{rank="1"': dict.fromkeys(EVER, LAG),
        'rankscope_run_lost_ratio{cause="none"': dict.fromkeys(EVER, 0.75),
        'rankscope_run_lost_ratio{cause="transfer"': dict.fromkeys(EVER, 0.25),
    }
    if kind:
        finding = f'kind="{kind}"{labels}'
        found[f"rankscope_finding_ratio{{{finding}"] = dict.fromkeys(EVER, ratio)
        found[f"rankscope_finding_since_timestamp_seconds{{{finding}"] = dict.fromkeys(EVER, since)
    return {**run, **found}


AHEAD = 3600
LAG = 0.02
CRASH = ("sigterm", "killed")
FINISH = ("finished", "finished")
RUNS = {
    "well": life(),
    "crashed": life(ends=NOW - 300, reasons=CRASH),
    "crashed-long-ago": life(ends=NOW - 900, reasons=CRASH),
    "crashed-and-started-anew": one_after_the_other(life(ends=NOW - 600, reasons=CRASH), life(begins=NOW - 540)),
    "crashed-and-finished-then": one_after_the_other(
        life(ends=NOW - 1080, reasons=CRASH), life(begins=NOW - 900, ends=NOW - 300, reasons=FINISH)
    ),
    "finished": life(ends=NOW - 300, reasons=FINISH),
    "stands-still": life(moves_until=NOW - 720),
    "pauses": life(moves_until=NOW - 30),
    "gone": life(ends=NOW - 720),
    "well-ahead": life(ahead=AHEAD),
    "crashed-ahead": life(ends=NOW - 300, reasons=CRASH, ahead=AHEAD),
    "judged-well": judged(life()),
    "judged-slow": judged(life(), "straggler", ',rank="1",cause="data_wait"', 0.3),
    "judged-in-turn": judged(life(), "rotating_straggler", ',cause="gc"', 0.2),
    "judged-hangs": judged(life(moves_until=NOW - 720), "hang", ',rank="1"', 1.0, NOW - 700),
}
STATES = {
    "well": ("running", 0),
    "crashed": ("crashed", 300),
    "crashed-long-ago": ("crashed", 900),
    "crashed-and-started-anew": ("running", 0),
    "crashed-and-finished-then": ("ended", 300),
    "finished": ("ended", 300),
    "stands-still": ("stands still", 720),
    "pauses": ("no progress", 30),
    "gone": ("not seen", 720 + INTERVAL),  # since the last scrape that saw it
    "well-ahead": ("running", 0),
    "crashed-ahead": ("crashed", 300),
    "judged-well": ("running", 0),
    "judged-slow": ("running", 0),
    "judged-in-turn": ("running", 0),
    "judged-hangs": ("stands still", 700),
}


def notation(values: dict[int, float]) -> str:
    """promtool's; a series that ends is marked as stale at once, as by a scrape that no longer has it."""
    return " ".join(f"{values[time]:.10g}" if time in values else "stale" for time in EVER)


def series(run: str) -> Iterator[dict[str, str]]:
    """promtool's input. The job has another name than in our prometheus.yml."""
    common = f'job="exporters",instance="{run}"'
    for start, values in RUNS[run].items():
        more = common if start.startswith("rankscope_exporter") else f'{common},run="{run}"'
        yield {"series": f"{start}{'' if start.endswith('{') else ','}{more}}}", "values": notation(values)}


def complaint_about(panel: str, expected: Mapping[str, Samples], tmp_path: Path, number: int = 0) -> str:
    """promtool's, if this query of the panel answers something else about these runs, or ''."""
    questions = [
        {"expr": query(panel, run, number), "eval_time": f"{NOW}s", "exp_samples": [*samples_of(samples)]}
        for run, samples in expected.items()
    ]
    inputs = [one for run in RUNS for one in series(run)]
    test = {"interval": f"{INTERVAL}s", "input_series": inputs, "promql_expr_test": questions}
    return complaint(test, PRODUCTION, tmp_path / "test.yml")


def query(panel: str, run: str, number: int) -> str:
    asked = panel_queries(run=run, owner="", instance=run, interval=RANGE)
    return [query.expr for query in asked if (query.dashboard, query.panel) == ("run", panel)][number]


def samples_of(samples: Samples) -> Iterator[dict[str, object]]:
    for labels, value in samples.items():
        yield {"labels": labels, "value": value}


def test_the_state_says_whether_a_run_lives_and_since_when_not(tmp_path: Path) -> None:
    expected = {run: {f'{{state="{state}"}}': seconds} for run, (state, seconds) in STATES.items()}
    assert complaint_about("State", expected, tmp_path) == ""


def test_nobody_is_said_to_lag_only_in_a_run_that_makes_steps(tmp_path: Path) -> None:
    lag = {'{who="nobody"}': WAITS[1] - WAITS[0]}
    # The steps of the one that pauses are in the window still.
    runs = {run: state for run, (state, _) in STATES.items() if run != "pauses" and not run.startswith("judged")}
    expected = {run: lag if state == "running" else {} for run, state in runs.items()}
    assert complaint_about(LAGGING, expected, tmp_path) == ""


def test_who_holds_the_others_up_is_a_rank_or_one_after_the_other(tmp_path: Path) -> None:
    expected = {
        "one rank has more to compute": '{who="rank 2 backward"}',
        "data is late on one rank after the other": '{who="rank after rank data_wait"}',
    }
    cases = [case for case in CASES if case.name in expected]
    end = (PRODUCTION.quiet + PRODUCTION.faulty - 1) * INTERVAL
    questions = [
        {"expr": f"group by (who) ({query(LAGGING, case.run, 0)})", "eval_time": f"{end}s"}
        | {"exp_samples": [{"labels": expected[case.name], "value": 1}]}
        for case in cases
    ]
    test = {"interval": f"{INTERVAL}s", "promql_expr_test": questions}
    test["input_series"] = [one for case in cases for one in promtool.series(case, PRODUCTION)]
    assert complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_of_a_run_that_its_exporter_judges_the_dashboard_says_what_the_exporter_found(tmp_path: Path) -> None:
    expected = {
        "judged-well": {'{who="nobody"}': LAG},
        "judged-slow": {'{who="rank 1 data_wait"}': 0.3},
        "judged-in-turn": {'{who="rank after rank gc"}': 0.2},
    }
    assert complaint_about(LAGGING, expected, tmp_path) == ""
    assert complaint_about("Time lost", {"judged-well": {"{}": 0.25}}, tmp_path) == ""
    by_rank = {'{run="judged-well",rank="0"}': 0.5 * LAG, '{run="judged-well",rank="1"}': LAG}
    assert complaint_about("Lag by rank", {"judged-well": by_rank}, tmp_path) == ""


def test_nothing_is_said_to_fire_only_of_a_run_that_lives(tmp_path: Path) -> None:
    expected = {run: {'{alertname="nothing fires"}': 1.0} for run in ("well", "well-ahead", "pauses")}
    expected |= {run: {} for run in ("finished", "gone", "crashed-long-ago", "crashed-and-finished-then")}
    assert complaint_about("Alerts", expected, tmp_path) == ""


@pytest.mark.parametrize(
    ("panel", "number", "answer"),
    [
        ("What each rank does now", 1, {f'{{phase="forward",rank="{rank}"}}': 60.0 for rank in (0, 1)}),
        ("Last checkpoint by rank", 1, {f'{{rank="{rank}"}}': 300.0 for rank in (0, 1)}),
        ("Since the last checkpoint", 0, {"{}": 300.0}),
    ],
)
def test_an_age_is_by_prometheus_clock(panel: str, number: int, answer: Samples, tmp_path: Path) -> None:
    assert complaint_about(panel, {"well": answer, "well-ahead": answer}, tmp_path, number) == ""
