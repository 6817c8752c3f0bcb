"""The dashboard *Run* for healthy, ended and missing runs, with correct and wrong clocks, evaluated by promtool."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from testing import servers

from rankscope_dashboards.queries import panel_queries
from rankscope_dashboards.selectors import SHOWN_RANKS

INTERVAL = 15
NOW, RANGE = 2400, "20m"
ALL_TIMES = range(0, NOW + 1, INTERVAL)
SHOWN_FOR = 600  # seconds for which an exporter shows an ended rank
CHECKPOINT = NOW - 300
STRAGGLER = "Straggler"
WAIT_RATIOS = (0.125, 0.25)  # of the two ranks, in collectives
DEVICE_RATIOS = {
    "forward": 0.0625,
    "collective_wait": 0.1875,
    "other": 0.0,
    "checkpoint": 0.5,
}  # of each rank's time, in the measured steps

Values = Mapping[int, float]
"""The values of a series by time."""
Run = dict[str, dict[int, float]]
"""The values of each series; its name ends in the labels without the closing brace."""
Samples = Mapping[str, float]
"""Values by labels, in promtool's format."""


def always(value: float, times: Iterable[int] = ALL_TIMES) -> dict[int, float]:
    return dict.fromkeys(times, value)


def life(
    begins: int = 0,
    ends: int = NOW + INTERVAL,
    reasons: tuple[str, str] | None = None,
    moves_until: int = NOW,
    ahead: int = 0,
    phase: str = "forward",
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
            f'rankscope_rank_info{{{common},group="0-1"': always(1, shown),
            f"rankscope_rank_up{{{common}": always(0, ended) | always(1, alive),
            f"rankscope_rank_last_progress_timestamp_seconds{{{common}": {t: at + ahead for t, at in moved.items()},
            f'rankscope_rank_phase_since_timestamp_seconds{{{common},phase="{phase}"': always(
                moves_until - 60 + ahead, alive
            ),
            f"rankscope_rank_checkpoint_last_timestamp_seconds{{{common}": always(CHECKPOINT + ahead, alive),
            f"rankscope_rank_checkpoints_total{{{common}": always(1, alive),
            f"rankscope_rank_steps_total{{{common}": moved,
            **seconds(
                "phase",
                common,
                alive,
                {"collective_wait": wait, "checkpoint": 0.5, "forward": 0.5 - wait, "other": 0.0},
            ),
        }
        if reasons:
            found[f'rankscope_rank_exit_info{{{common},reason="{reasons[rank]}"'] = always(1, ended)
            found[f"rankscope_rank_exit_timestamp_seconds{{{common}"] = always(ends + ahead, ended)
    return found


def seconds(clock: str, common: str, times: Iterable[int], ratios: Mapping[str, float]) -> Run:
    """Return a rank's counters of time by phase, as its host's (`phase`) or its GPU's clock (`device`) has them."""
    return {
        f'rankscope_rank_{clock}_seconds_total{{{common},phase="{phase}"': {time: time * ratio for time in times}
        for phase, ratio in ratios.items()
    }


def measured(run: Run) -> Run:
    """Return the run with GPU time of some of its steps, for both ranks."""
    found = dict(run)
    for rank in range(len(WAIT_RATIOS)):
        found |= seconds("device", f'rank="{rank}"', ALL_TIMES, DEVICE_RATIOS)
        found[f'rankscope_rank_device_steps_total{{rank="{rank}"'] = {time: float(time) for time in ALL_TIMES}
    return found


def restarted(first: Run, second: Run) -> Run:
    """Return a run that was restarted."""
    both: Run = defaultdict(dict)
    for series, values in (*first.items(), *second.items()):
        both[series] |= values
    return both


def shown_twice(run: Run) -> Run:
    """Return the run as two exporters on one node show it, one of them with a pod that was just replaced."""
    pods = ('pod="old",instance="first"', 'pod="new",instance="first"', 'pod="other",instance="second"')
    return {
        f"{series}{'' if series.endswith('{') else ','}{pod}": values for series, values in run.items() for pod in pods
    }


def diagnosed(run: Run, kind: str = "", labels: str = "", ratio: float = 0.0, since: int = 0) -> Run:
    """Return the run with its exporter's diagnosis."""
    found: Run = {
        'rankscope_rank_lag_ratio{rank="0"': always(0.5 * LAG),
        'rankscope_rank_lag_ratio{rank="1"': always(LAG),
        'rankscope_run_lost_ratio{cause="none"': always(0.75),
        'rankscope_run_lost_ratio{cause="transfer"': always(0.25),
    }
    if kind:
        finding = f'kind="{kind}"{labels}'
        found[f"rankscope_finding_ratio{{{finding}"] = always(ratio)
        found[f"rankscope_finding_since_timestamp_seconds{{{finding}"] = always(since)
        found[f'rankscope_finding_evidence{{{finding},name="steps"'] = always(7)
    return {**run, **found}


def large() -> Run:
    """Return a run of more ranks than a graph shows; the lag of each rank is its number."""
    return {f'rankscope_rank_lag_ratio{{rank="{rank}"': always(rank) for rank in range(SHOWN_RANKS + 10)}


AHEAD = 3600
LAG = 0.02
CRASH = ("sigterm", "killed")
FINISH = ("finished", "finished")
STANDSTILL = life(moves_until=NOW - 720)
RUNS = {
    "healthy": life(),
    "crashed": life(ends=NOW - 300, reasons=CRASH),
    "crashed-long-ago": life(ends=NOW - 900, reasons=CRASH),
    "crashed-and-restarted": restarted(life(ends=NOW - 600, reasons=CRASH), life(begins=NOW - 540)),
    "crashed-then-finished": restarted(
        life(ends=NOW - 1080, reasons=CRASH), life(begins=NOW - 900, ends=NOW - 300, reasons=FINISH)
    ),
    "finished": life(ends=NOW - 300, reasons=FINISH),
    "hung": diagnosed(STANDSTILL, "hang", ',rank="1"', 1.0, NOW - 700),
    "hung-on-nodes": diagnosed(STANDSTILL, "hang", ',rank="1",instance="analyzer"', 1.0, NOW - 700),
    "hung-ahead": diagnosed(life(moves_until=NOW - 720, ahead=AHEAD), "hang", ',rank="1"', 1.0, NOW - 700 + AHEAD),
    "pauses": life(moves_until=NOW - 45),
    "writes-a-checkpoint": life(moves_until=NOW - 45, phase="checkpoint"),
    "gone": life(ends=NOW - 720),
    "healthy-ahead": life(ahead=AHEAD),
    "crashed-ahead": life(ends=NOW - 300, reasons=CRASH, ahead=AHEAD),
    "no-straggler": diagnosed(life()),
    "no-step": diagnosed(life(moves_until=NOW - 1500)),
    "one-slow-rank": diagnosed(life(), "straggler", ',rank="1",cause="data_wait"', 0.3),
    "a-rotating-straggler": diagnosed(life(), "rotating_straggler", ',cause="gc"', 0.2),
    "measured": measured(life()),
    "shown-twice": shown_twice(diagnosed(measured(life()), "straggler", ',rank="1",cause="data_wait"', 0.3)),
}
STATES = {
    "crashed": ("crashed", 300),
    "crashed-long-ago": ("crashed", 900),
    "crashed-then-finished": ("ended", 300),
    "finished": ("ended", 300),
    "hung": ("hung", 700),
    "hung-on-nodes": ("hung", 700),
    "hung-ahead": ("hung", 700),
    "pauses": ("no progress", 45),
    "no-step": ("no progress", 1500),
    "writes-a-checkpoint": ("running", 45),
    "gone": ("not seen", 720 + INTERVAL),  # since the last scrape with the run
    "crashed-ahead": ("crashed", 300),
}
HOST_PHASES = {
    '{phase="collective_wait"}': 0.1875,
    '{phase="checkpoint"}': 0.5,
    '{phase="forward"}': 0.3125,
    '{phase="other"}': 0.0,
}
DEVICE_PHASES = {
    '{phase="collective_wait"}': 0.375,
    '{phase="checkpoint"}': 0.5,
    '{phase="forward"}': 0.125,
    '{phase="other"}': 0.0,
}


def notation(values: Values) -> str:
    """Return the values in promtool's notation. A series that ends becomes stale at once, as in a scrape without it."""
    return " ".join(f"{values[time]:.10g}" if time in values else "stale" for time in ALL_TIMES)


def series(name: str, run: Run) -> Iterator[dict[str, str]]:
    """Yield promtool's input. The job has another name than in our prometheus.yml."""
    for start, values in run.items():
        labels = ['job="exporters"']
        labels += [f'instance="{name}"'] * ("instance=" not in start)
        labels += [f'run="{name}"'] * (not start.startswith("rankscope_exporter"))
        yield {
            "series": f"{start}{'' if start.endswith('{') else ','}{','.join(labels)}}}",
            "values": notation(values),
        }


def query(panel: str, run: str, number: int = 0) -> str:
    queries = panel_queries(run=run, owner="", instance=run, interval=RANGE)
    return [query.expr for query in queries if (query.dashboard, query.panel) == ("run", panel)][number]


def promtool_error(
    panel: str, expected: Mapping[str, Samples], tmp_path: Path, number: int = 0, runs: Mapping[str, Run] = RUNS
) -> str:
    """Return promtool's error if this query of the panel has other results for these runs, else ''."""
    tests = [
        {
            "expr": query(panel, run, number),
            "eval_time": f"{NOW}s",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for run, samples in expected.items()
    ]
    inputs = [one for name, run in runs.items() for one in series(name, run)]
    test = {"interval": f"{INTERVAL}s", "input_series": inputs, "promql_expr_test": tests}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": f"{INTERVAL}s", "tests": [test]}))
    found = subprocess.run(
        [servers.program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    return found.stdout + found.stderr if found.returncode else ""


def test_the_state_shows_whether_a_run_is_alive_and_since_when(tmp_path: Path) -> None:
    states = {run: STATES.get(run, ("running", 0)) for run in RUNS}
    expected = {run: {f'{{state="{state}"}}': seconds} for run, (state, seconds) in states.items()}
    assert promtool_error("State", expected, tmp_path) == ""


def test_the_dashboard_shows_the_exporters_diagnosis(tmp_path: Path) -> None:
    expected = {
        "healthy": {},
        "no-step": {},
        "no-straggler": {'{who="no straggler"}': LAG},
        "one-slow-rank": {'{who="rank 1 data_wait"}': 0.3},
        "a-rotating-straggler": {'{who="rank (rotating) gc"}': 0.2},
        "shown-twice": {'{who="rank 1 data_wait"}': 0.3},
    }
    assert promtool_error(STRAGGLER, expected, tmp_path) == ""
    assert promtool_error("Lost time", {run: {"{}": 0.25} for run in ("no-straggler", "shown-twice")}, tmp_path) == ""
    evidence = {'{kind="straggler",rank="1",cause="data_wait",name="steps"}': 7.0}
    assert promtool_error("Evidence", {"no-straggler": {}, "one-slow-rank": evidence}, tmp_path) == ""


def test_a_run_of_many_ranks_shows_those_with_the_largest_lag(tmp_path: Path) -> None:
    by_rank = {f'{{rank="{rank}"}}': float(rank) for rank in range(10, SHOWN_RANKS + 10)}
    assert promtool_error("Lag by rank", {"large": by_rank}, tmp_path, runs={"large": large()}) == ""


@pytest.mark.parametrize(
    ("panel", "healthy", "measured"),
    [
        ("Clock", {'{clock="host"}': 1.0}, {'{clock="device"}': 1.0}),
        ("Time by phase", HOST_PHASES, DEVICE_PHASES),
        ("Host time by phase", HOST_PHASES, HOST_PHASES),
        ("Wait by rank", {'{rank="0"}': 0.125, '{rank="1"}': 0.25}, {'{rank="0"}': 0.75, '{rank="1"}': 0.75}),
        ("Ranks alive", {"{}": 2.0}, {"{}": 2.0}),
    ],
)
def test_time_is_measured_on_the_gpu_if_possible_and_counts_each_rank_once(
    panel: str, healthy: Samples, measured: Samples, tmp_path: Path
) -> None:
    runs = {"healthy": healthy, "measured": measured, "shown-twice": measured}
    assert promtool_error(panel, runs, tmp_path) == ""


def test_no_alerts_is_shown_only_for_a_live_run(tmp_path: Path) -> None:
    alive = ("healthy", "healthy-ahead", "pauses", "hung", "shown-twice")
    expected: dict[str, Samples] = {run: {'{alertname="no alerts"}': 1.0} for run in alive}
    expected |= {run: {} for run in ("finished", "gone", "crashed-long-ago", "crashed-then-finished")}
    assert promtool_error("Alerts", expected, tmp_path) == ""


@pytest.mark.parametrize(
    ("panel", "number", "answer"),
    [
        ("Current state of each rank", 1, {f'{{phase="forward",rank="{rank}"}}': 60.0 for rank in (0, 1)}),
        ("Current state of each rank", 2, {f'{{rank="{rank}"}}': 0.0 for rank in (0, 1)}),
        ("Last checkpoint by rank", 1, {f'{{rank="{rank}"}}': 300.0 for rank in (0, 1)}),
        ("Since the last checkpoint", 0, {"{}": 300.0}),
    ],
)
def test_an_age_is_by_the_exporters_clock(panel: str, number: int, answer: Samples, tmp_path: Path) -> None:
    runs = dict.fromkeys(("healthy", "healthy-ahead", "shown-twice"), answer)
    assert promtool_error(panel, runs, tmp_path, number) == ""
