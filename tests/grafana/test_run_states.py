"""The dashboard *Run* for healthy, ended and missing runs, with correct and wrong clocks, evaluated by promtool."""

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
ALL_TIMES = range(0, NOW + 1, INTERVAL)
SHOWN_FOR = 600  # seconds for which an exporter shows an ended rank
CHECKPOINT = NOW - 300
STRAGGLER = "Straggler"

WAIT_RATIOS = (0.125, 0.15625)  # of the two ranks, in collectives

Run = dict[str, dict[int, float]]
"""The values of each series by time."""
Samples = Mapping[str, float]
"""Values by labels, in promtool's format."""


def life(
    begins: int = 0,
    ends: int = NOW + INTERVAL,
    reasons: tuple[str, str] | None = None,
    moves_until: int = NOW,
    ahead: int = 0,
) -> Run:
    """Return a run of two ranks; with `reasons` they are shown after their end. Its exporter's clock may be `ahead`."""
    alive = range(begins, ends, INTERVAL)
    ended = range(ends, min(ends + SHOWN_FOR, NOW + 1), INTERVAL) if reasons else ()
    shown = (*alive, *ended)
    moved = {time: float(min(time, moves_until)) for time in alive}
    found: Run = {"rankscope_exporter_time_seconds{": {time: time + ahead for time in ALL_TIMES}}
    for rank, wait in enumerate(WAIT_RATIOS):
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
            f'rankscope_rank_phase_seconds_total{{{common},phase="collective_wait"': {t: t * wait for t in alive},
            f'rankscope_rank_phase_seconds_total{{{common},phase="forward"': {t: t * (1 - wait) for t in alive},
        }
        if reasons:
            found[f'rankscope_rank_exit_info{{{common},reason="{reasons[rank]}"'] = dict.fromkeys(ended, 1)
            found[f"rankscope_rank_exit_timestamp_seconds{{{common}"] = dict.fromkeys(ended, ends + ahead)
    return found


def restarted(first: Run, second: Run) -> Run:
    """Return a run that was restarted."""
    both: Run = defaultdict(dict)
    for series, values in (*first.items(), *second.items()):
        both[series] |= values
    return both


def diagnosed(run: Run, kind: str = "", labels: str = "", ratio: float = 0.0, since: int = 0) -> Run:
    """Return the run with its exporter's diagnosis."""
    found = {
        'rankscope_run_judged_info{by="node-a"': dict.fromkeys(ALL_TIMES, 1.0),
        'rankscope_rank_lag_ratio{rank="0"': dict.fromkeys(ALL_TIMES, 0.5 * LAG),
        'rankscope_rank_lag_ratio{rank="1"': dict.fromkeys(ALL_TIMES, LAG),
        'rankscope_run_lost_ratio{cause="none"': dict.fromkeys(ALL_TIMES, 0.75),
        'rankscope_run_lost_ratio{cause="transfer"': dict.fromkeys(ALL_TIMES, 0.25),
    }
    if kind:
        finding = f'kind="{kind}"{labels}'
        found[f"rankscope_finding_ratio{{{finding}"] = dict.fromkeys(ALL_TIMES, ratio)
        found[f"rankscope_finding_since_timestamp_seconds{{{finding}"] = dict.fromkeys(ALL_TIMES, since)
    return {**run, **found}


AHEAD = 3600
LAG = 0.02
CRASH = ("sigterm", "killed")
FINISH = ("finished", "finished")
RUNS = {
    "healthy": life(),
    "crashed": life(ends=NOW - 300, reasons=CRASH),
    "crashed-long-ago": life(ends=NOW - 900, reasons=CRASH),
    "crashed-and-restarted": restarted(life(ends=NOW - 600, reasons=CRASH), life(begins=NOW - 540)),
    "crashed-then-finished": restarted(
        life(ends=NOW - 1080, reasons=CRASH), life(begins=NOW - 900, ends=NOW - 300, reasons=FINISH)
    ),
    "finished": life(ends=NOW - 300, reasons=FINISH),
    "hung": life(moves_until=NOW - 720),
    "pauses": life(moves_until=NOW - 30),
    "gone": life(ends=NOW - 720),
    "healthy-ahead": life(ahead=AHEAD),
    "crashed-ahead": life(ends=NOW - 300, reasons=CRASH, ahead=AHEAD),
    "diagnosed-healthy": diagnosed(life()),
    "diagnosed-slow": diagnosed(life(), "straggler", ',rank="1",cause="data_wait"', 0.3),
    "diagnosed-rotating": diagnosed(life(), "rotating_straggler", ',cause="gc"', 0.2),
    "diagnosed-hung": diagnosed(life(moves_until=NOW - 720), "hang", ',rank="1"', 1.0, NOW - 700),
}
STATES = {
    "healthy": ("running", 0),
    "crashed": ("crashed", 300),
    "crashed-long-ago": ("crashed", 900),
    "crashed-and-restarted": ("running", 0),
    "crashed-then-finished": ("ended", 300),
    "finished": ("ended", 300),
    "hung": ("hung", 720),
    "pauses": ("no progress", 30),
    "gone": ("not seen", 720 + INTERVAL),  # since the last scrape with the run
    "healthy-ahead": ("running", 0),
    "crashed-ahead": ("crashed", 300),
    "diagnosed-healthy": ("running", 0),
    "diagnosed-slow": ("running", 0),
    "diagnosed-rotating": ("running", 0),
    "diagnosed-hung": ("hung", 700),
}


def notation(values: dict[int, float]) -> str:
    """Return the values in promtool's notation. A series that ends becomes stale at once, as in a scrape without it."""
    return " ".join(f"{values[time]:.10g}" if time in values else "stale" for time in ALL_TIMES)


def series(run: str) -> Iterator[dict[str, str]]:
    """Yield promtool's input. The job has another name than in our prometheus.yml."""
    common = f'job="exporters",instance="{run}"'
    for start, values in RUNS[run].items():
        more = common if start.startswith("rankscope_exporter") else f'{common},run="{run}"'
        yield {"series": f"{start}{'' if start.endswith('{') else ','}{more}}}", "values": notation(values)}


def promtool_error(panel: str, expected: Mapping[str, Samples], tmp_path: Path, number: int = 0) -> str:
    """Return promtool's error if this query of the panel has other results for these runs, else ''."""
    tests = [
        {"expr": query(panel, run, number), "eval_time": f"{NOW}s", "exp_samples": [*samples_of(samples)]}
        for run, samples in expected.items()
    ]
    inputs = [one for run in RUNS for one in series(run)]
    test = {"interval": f"{INTERVAL}s", "input_series": inputs, "promql_expr_test": tests}
    return complaint(test, PRODUCTION, tmp_path / "test.yml")


def query(panel: str, run: str, number: int) -> str:
    queries = panel_queries(run=run, owner="", instance=run, interval=RANGE)
    return [query.expr for query in queries if (query.dashboard, query.panel) == ("run", panel)][number]


def samples_of(samples: Samples) -> Iterator[dict[str, object]]:
    for labels, value in samples.items():
        yield {"labels": labels, "value": value}


def test_the_state_shows_whether_a_run_is_alive_and_since_when(tmp_path: Path) -> None:
    expected = {run: {f'{{state="{state}"}}': seconds} for run, (state, seconds) in STATES.items()}
    assert promtool_error("State", expected, tmp_path) == ""


def test_no_straggler_is_shown_only_for_a_run_that_makes_steps(tmp_path: Path) -> None:
    lag = {'{who="no straggler"}': WAIT_RATIOS[1] - WAIT_RATIOS[0]}
    # The rate window still contains steps of the run that pauses.
    runs = {run: state for run, (state, _) in STATES.items() if run != "pauses" and not run.startswith("diagnosed")}
    expected = {run: lag if state == "running" else {} for run, state in runs.items()}
    assert promtool_error(STRAGGLER, expected, tmp_path) == ""


def test_the_straggler_is_a_rank_or_rotates(tmp_path: Path) -> None:
    expected = {
        "one rank has more to compute": '{who="rank 2 backward"}',
        "data is late on one rank after the other": '{who="rank (rotating) data_wait"}',
    }
    cases = [case for case in CASES if case.name in expected]
    end = (PRODUCTION.quiet + PRODUCTION.faulty - 1) * INTERVAL
    tests = [
        {"expr": f"group by (who) ({query(STRAGGLER, case.run, 0)})", "eval_time": f"{end}s"}
        | {"exp_samples": [{"labels": expected[case.name], "value": 1}]}
        for case in cases
    ]
    test = {"interval": f"{INTERVAL}s", "promql_expr_test": tests}
    test["input_series"] = [one for case in cases for one in promtool.series(case, PRODUCTION)]
    assert complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_the_dashboard_shows_the_exporters_diagnosis(tmp_path: Path) -> None:
    expected = {
        "diagnosed-healthy": {'{who="no straggler"}': LAG},
        "diagnosed-slow": {'{who="rank 1 data_wait"}': 0.3},
        "diagnosed-rotating": {'{who="rank (rotating) gc"}': 0.2},
    }
    assert promtool_error(STRAGGLER, expected, tmp_path) == ""
    assert promtool_error("Lost time", {"diagnosed-healthy": {"{}": 0.25}}, tmp_path) == ""
    by_rank = {'{run="diagnosed-healthy",rank="0"}': 0.5 * LAG, '{run="diagnosed-healthy",rank="1"}': LAG}
    assert promtool_error("Lag by rank", {"diagnosed-healthy": by_rank}, tmp_path) == ""


def test_no_alerts_is_shown_only_for_a_live_run(tmp_path: Path) -> None:
    expected = {run: {'{alertname="no alerts"}': 1.0} for run in ("healthy", "healthy-ahead", "pauses")}
    expected |= {run: {} for run in ("finished", "gone", "crashed-long-ago", "crashed-then-finished")}
    assert promtool_error("Alerts", expected, tmp_path) == ""


@pytest.mark.parametrize(
    ("panel", "number", "answer"),
    [
        ("Current state of each rank", 1, {f'{{phase="forward",rank="{rank}"}}': 60.0 for rank in (0, 1)}),
        ("Last checkpoint by rank", 1, {f'{{rank="{rank}"}}': 300.0 for rank in (0, 1)}),
        ("Since the last checkpoint", 0, {"{}": 300.0}),
    ],
)
def test_an_age_is_by_prometheus_clock(panel: str, number: int, answer: Samples, tmp_path: Path) -> None:
    assert promtool_error(panel, {"healthy": answer, "healthy-ahead": answer}, tmp_path, number) == ""
