"""The dashboard *Run* for healthy, ended and missing runs, with correct and wrong clocks, evaluated by promtool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from testing.promtool import INTERVAL, complaint

from rankscope_dashboards.by_rank import SHOWN_NODES
from rankscope_dashboards.findings import ALERT_TEXTS, FIRST_STEPS
from rankscope_dashboards.links import RANK_ZERO
from rankscope_dashboards.queries import panel_queries
from rankscope_dashboards.selectors import ALL_RANKS, NAMED_RANKS
from rankscope_dashboards.verdict import COLORS

NOW, RANGE = 2400, "20m"
ALL_TIMES = range(0, NOW + 1, INTERVAL)
SHOWN_FOR = 600  # seconds for which an exporter shows an ended rank
CHECKPOINT = NOW - 300
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


def diagnosed(
    run: Run, kind: str = "", labels: str = "", ratio: float = 0.0, since: int = 0, says: str = "", severity: str = ""
) -> Run:
    """Return the run with its exporter's diagnosis."""
    found: Run = {
        'rankscope_rank_lag_ratio{rank="0"': always(0.5 * LAG),
        'rankscope_rank_lag_ratio{rank="1"': always(LAG),
        'rankscope_run_lost_ratio{cause="none"': always(0.75),
        'rankscope_run_lost_ratio{cause="transfer"': always(0.25),
        'rankscope_run_judged_info{by="node-a"': always(1),
    }
    if kind:
        finding = f'kind="{kind}",severity="{severity or "warning"}"{labels}'
        words = f'summary="{says}",evidence="Steps: 7.",advice="{ADVICE}"'
        found[f"rankscope_finding_ratio{{{finding}"] = always(ratio)
        found[f"rankscope_finding_since_timestamp_seconds{{{finding}"] = always(since)
        found[f"rankscope_finding_info{{{finding},{words}"] = always(1)
    return {**run, **found}


def hung(run: Run, since: int, labels: str = "") -> Run:
    """Return the run with a hang of rank 1, while the other rank is in a collective."""
    says = "Run x hangs: Rank 1 (node-a, GPU 1) is stuck in data_wait"
    collectives: Run = {
        'rankscope_rank_collective_open_info{rank="0",op="all_reduce",group="0-1"': always(1),
        'rankscope_rank_group_collectives_total{rank="0",group="0-1"': always(512),
        'rankscope_rank_group_collectives_total{rank="1",group="0-1"': always(511),
    }
    return diagnosed({**run, **collectives}, "hang", f',rank="1"{labels}', 1.0, since, says, "critical")


def of_ranks(ranks: int) -> Run:
    """Return a run of so many ranks, four on a node; the lag of each rank is its number."""
    found: Run = {f'rankscope_rank_lag_ratio{{rank="{rank}"': always(rank) for rank in range(ranks)}
    places = {rank: f'rankscope_rank_info{{rank="{rank}",node="node-{rank // 4}"' for rank in range(ranks)}
    return found | {place: always(1) for place in places.values()}


AHEAD = 3600
ADVICE = "Look."
LATE = "Rank 1 (node-a, GPU 1) slows down run x by 30%"
SLOW = ',rank="1",cause="data_wait"'
IN_TURN = "The ranks of run x slow each other down in turn by 20%"
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
    "hung": hung(STANDSTILL, NOW - 700),
    "hung-on-nodes": hung(STANDSTILL, NOW - 700, ',instance="analyzer"'),
    "hung-ahead": hung(life(moves_until=NOW - 720, ahead=AHEAD), NOW - 700 + AHEAD),
    "just-hung": hung(life(moves_until=NOW - 40), NOW - 20),
    "just-crashed": diagnosed(
        life(ends=NOW - 300, reasons=CRASH), "crash", ',rank="1"', 1.0, NOW - 300, "Rank 1 was killed", "critical"
    ),
    "pauses": life(moves_until=NOW - 45),
    "writes-a-checkpoint": life(moves_until=NOW - 45, phase="checkpoint"),
    "gone": life(ends=NOW - 720),
    "healthy-ahead": life(ahead=AHEAD),
    "crashed-ahead": life(ends=NOW - 300, reasons=CRASH, ahead=AHEAD),
    "no-straggler": diagnosed(life()),
    "no-step": diagnosed(life(moves_until=NOW - 1500)),
    "one-slow-rank": diagnosed(life(), "straggler", SLOW, 0.3, says=LATE),
    "two-slow-ranks": diagnosed(life(), "straggler", ',rank="0-1",cause="data_wait"', 0.3, says=LATE),
    "slow-rank-zero": diagnosed(life(), "straggler", ',rank="0",cause="other"', 0.3, says="Rank 0 slows down run x"),
    "a-rotating-straggler": diagnosed(life(), "rotating_straggler", ',cause="gc"', 0.2, says=IN_TURN),
    "two-findings": {
        **diagnosed(life(), "straggler", SLOW, 0.3, says=LATE),
        **diagnosed(life(), "rotating_straggler", ',cause="gc"', 0.2, says=IN_TURN),
    },
    "measured": measured(life()),
    "shown-twice": shown_twice(diagnosed(measured(life()), "straggler", SLOW, 0.3, says=LATE)),
}
LOST = " ago: a rank was killed or ended with an exception"
STUCK = ": Rank 1 (node-a, GPU 1) is stuck in data_wait, others in all_reduce 512"
STILL = ": no rank ends a step, a pass or a collective"
VERDICTS = {
    "crashed": f"CRASHED 5 min{LOST}",
    "crashed-long-ago": f"CRASHED 15 min{LOST}",
    "crashed-then-finished": "ENDED 5 min ago",
    "finished": "ENDED 5 min ago",
    "hung": f"HUNG for 11.7 min{STUCK}",
    "hung-on-nodes": f"HUNG for 11.7 min{STUCK}",
    "hung-ahead": f"HUNG for 11.7 min{STUCK}",
    "just-hung": f"HUNG for 20 s{STUCK}",
    "just-crashed": "CRASHED 5 min ago: Rank 1 was killed",
    "pauses": f"NO PROGRESS for 0.8 min{STILL}",
    "no-step": f"NO PROGRESS for 25 min{STILL}",
    "gone": "NOT SEEN for about 13 min: its ranks have no exporter now",
    "crashed-ahead": f"CRASHED 5 min{LOST}",
    "no-straggler": "RUNNING: no problem found, 2 ranks alive",
    "one-slow-rank": f"WARNING for 40 min: {LATE}",
    "two-slow-ranks": f"WARNING for 40 min: {LATE}",
    "slow-rank-zero": "WARNING for 40 min: Rank 0 slows down run x",
    "a-rotating-straggler": f"WARNING for 40 min: {IN_TURN}",
    "two-findings": f"WARNING for 40 min: {LATE}",
    "shown-twice": f"WARNING for 40 min: {LATE}",
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
        labels += [f'run="{name}"'] * (",run=" not in start and not start.startswith("rankscope_exporter"))
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
    return complaint(test, tmp_path / "test.yml", rules=None)


def test_the_verdict_says_what_is_wrong_and_for_how_long(tmp_path: Path) -> None:
    undiagnosed = "NOT DIAGNOSED: 2 ranks alive, and nothing looks for problems"
    expected = {run: {f'{{said="{VERDICTS.get(run, undiagnosed)}"}}': 1.0} for run in RUNS}
    assert promtool_error("Verdict", expected, tmp_path) == ""


def test_no_verdict_is_given_about_an_unknown_run(tmp_path: Path) -> None:
    said = {'{said="NO DATA: no rank of this run in this time range"}': 1.0}
    assert promtool_error("Verdict", {"unknown": said}, tmp_path) == ""


def test_every_verdict_has_a_color() -> None:
    for said in (*VERDICTS.values(), "CRITICAL for 3 min: ", "NOT DIAGNOSED: "):
        assert any(said.startswith(begin) for begin in COLORS), said


def finding(run: str, kind: str, rank: str, says: str, runbook: str = "") -> str:
    labels = {"run": run, "kind": kind, "severity": "warning", "rank": rank, "at": f"{kind}/{rank}"}
    labels |= {"summary": says, "advice": ADVICE, "runbook": runbook or kind}
    labels["panels"] = rank if rank.isdecimal() else "All"
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items() if value) + "}"


def test_the_table_has_one_line_for_each_finding_with_its_runbook(tmp_path: Path) -> None:
    zero = "Rank 0 slows down run x"
    expected: dict[str, Samples] = {
        "healthy": {},
        "no-straggler": {},
        "one-slow-rank": {finding("one-slow-rank", "straggler", "1", LATE): NOW},
        "slow-rank-zero": {finding("slow-rank-zero", "straggler", "0", zero, RANK_ZERO): NOW},
        "two-findings": {
            finding("two-findings", "straggler", "1", LATE): NOW,
            finding("two-findings", "rotating_straggler", "", IN_TURN): NOW,
        },
        "two-slow-ranks": {finding("two-slow-ranks", "straggler", "0-1", LATE): NOW},
        "shown-twice": {finding("shown-twice", "straggler", "1", LATE): NOW},
    }
    assert promtool_error("Findings and alerts", expected, tmp_path) == ""


def test_a_firing_alert_that_is_no_finding_has_a_line_and_one_about_a_finding_has_none(tmp_path: Path) -> None:
    alerts: Run = {}
    for name, kind in (("RankscopeGpuAllocatedIdle", "gpu_idle"), ("RankscopeRankStuck", "hang")):
        labels = f'alertname="{name}",kind="{kind}",severity="warning",rank="1",gpu="1"'
        alerts[f'ALERTS{{alertstate="firing",{labels}'] = always(1)
        alerts[f"ALERTS_FOR_STATE{{{labels}"] = always(NOW - 60)
    shown = (
        '{run="idle",severity="warning",rank="1",gpu="1",instance="idle",alertname="RankscopeGpuAllocatedIdle",'
        f'summary="{ALERT_TEXTS["RankscopeGpuAllocatedIdle"]}",runbook="RankscopeGpuAllocatedIdle",'
        f'advice="{FIRST_STEPS["RankscopeGpuAllocatedIdle"]}",panels="1"}}'
    )
    assert promtool_error("Findings and alerts", {"idle": {shown: 60.0}}, tmp_path, runs={"idle": alerts}) == ""


def test_a_firing_alert_about_a_gpu_of_the_run_has_a_line(tmp_path: Path) -> None:
    run: Run = {'rankscope_rank_info{rank="1",uuid="GPU-1"': always(1)}
    run |= {
        f'ALERTS{{alertstate="firing",alertname="RankscopeGpuLost",severity="critical",uuid="GPU-{gpu}",run=""': always(
            1
        )
        for gpu in (1, 2)
    }
    run |= {
        f'ALERTS_FOR_STATE{{alertname="RankscopeGpuLost",severity="critical",uuid="GPU-{gpu}",run=""': always(NOW - 60)
        for gpu in (1, 2)
    }
    shown = (
        '{severity="critical",instance="lost",alertname="RankscopeGpuLost",runbook="RankscopeGpuLost",panels="All",'
        f'summary="{ALERT_TEXTS["RankscopeGpuLost"]}",advice="{FIRST_STEPS["RankscopeGpuLost"]}"}}'
    )
    assert promtool_error("Findings and alerts", {"lost": {shown: 60.0}}, tmp_path, runs={"lost": run}) == ""


def row(rank: int, name: str) -> str:
    return f'{{rank="{rank}",row="{name}",at="{rank:04}"}}'


def test_all_ranks_of_a_small_run_have_a_row_in_their_order(tmp_path: Path) -> None:
    shown = {row(rank, f"rank {rank}"): float(rank) for rank in range(12)}
    runs = {"small": of_ranks(12)}
    assert promtool_error("Lag by rank over time", {"small": shown}, tmp_path, runs=runs) == ""
    for number in (1, 2, 3):
        assert promtool_error("Lag by rank over time", {"small": {}}, tmp_path, number, runs) == ""


def test_of_64_ranks_those_with_the_largest_lag_and_every_tenth_are_named(tmp_path: Path) -> None:
    worst = ALL_RANKS - NAMED_RANKS
    names = {rank: f"rank {rank}" if rank >= worst or rank % 10 == 0 else " " for rank in range(ALL_RANKS)}
    shown = {row(rank, name): float(rank) for rank, name in names.items()}
    runs = {"large": of_ranks(ALL_RANKS)}
    assert promtool_error("Lag by rank over time", {"large": shown}, tmp_path, runs=runs) == ""


def test_of_more_ranks_the_worst_have_a_row_and_nodes_and_the_others_are_summed_up(tmp_path: Path) -> None:
    ranks = ALL_RANKS + 36
    runs = {"huge": of_ranks(ranks)}
    worst = range(ranks - NAMED_RANKS, ranks)
    nodes = {
        f'{{node="node-{node}",instance="huge"}}': 4.0 * node + 3
        for node in range(ranks // 4 - SHOWN_NODES, ranks // 4)
    }
    panel = "Lag by rank over time"
    assert promtool_error(panel, {"huge": {row(r, f"rank {r}"): float(r) for r in worst}}, tmp_path, runs=runs) == ""
    assert promtool_error(panel, {"huge": nodes}, tmp_path, 1, runs) == ""
    assert promtool_error(panel, {"huge": {"{}": float(worst[0] - 1)}}, tmp_path, 2, runs) == ""
    assert promtool_error(panel, {"huge": {"{}": (worst[0] - 1) / 2}}, tmp_path, 3, runs) == ""


def test_a_graph_has_the_ranks_with_the_largest_values_and_a_band_of_the_others(tmp_path: Path) -> None:
    ranks = NAMED_RANKS + 10
    runs = {"large": of_ranks(ranks)}
    by_rank = {f'{{rank="{rank}"}}': float(rank) for rank in range(10, ranks)}
    assert promtool_error("Lag by rank", {"large": by_rank}, tmp_path, runs=runs) == ""
    assert promtool_error("Lag by rank", {"large": {"{}": 9.0}}, tmp_path, 1, runs) == ""
    assert promtool_error("Lag by rank", {"large": {"{}": 0.0}}, tmp_path, 2, runs) == ""


@pytest.mark.parametrize(
    ("panel", "healthy", "measured"),
    [
        ("Time by phase", HOST_PHASES, DEVICE_PHASES),
        ("Host time by phase", HOST_PHASES, HOST_PHASES),
        ("Ranks alive", {"{}": 2.0}, {"{}": 2.0}),
    ],
)
def test_time_is_measured_on_the_gpu_if_possible_and_counts_each_rank_once(
    panel: str, healthy: Samples, measured: Samples, tmp_path: Path
) -> None:
    runs = {"healthy": healthy, "measured": measured, "shown-twice": measured}
    assert promtool_error(panel, runs, tmp_path) == ""


@pytest.mark.parametrize(
    ("panel", "number", "answer"),
    [
        ("Current state of each rank", 1, {f'{{phase="forward",rank="{rank}"}}': 60.0 for rank in (0, 1)}),
        ("Current state of each rank", 2, {f'{{rank="{rank}"}}': 0.0 for rank in (0, 1)}),
        ("Last checkpoint by rank", 1, {f'{{rank="{rank}"}}': 300.0 for rank in (0, 1)}),
        ("Last save", 0, {"{}": 300.0}),
    ],
)
def test_an_age_is_by_the_exporters_clock(panel: str, number: int, answer: Samples, tmp_path: Path) -> None:
    runs = dict.fromkeys(("healthy", "healthy-ahead", "shown-twice"), answer)
    assert promtool_error(panel, runs, tmp_path, number) == ""
