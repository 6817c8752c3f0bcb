"""The dashboards *Fleet* and *Cost* in each state of runs, GPUs and exporters, evaluated by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from testing import servers

from rankscope_dashboards.fleet_gpus import SICK as FAULTS
from rankscope_dashboards.queries import panel_queries

INTERVAL, NOW = 60, 7200
TIMES = range(0, NOW + 1, INTERVAL)
EXPORTER = 'job="exporters",instance="a:10417"'
RUN = f'{EXPORTER},run="mine",owner="1000"'
RUNS, NODES = "All runs, the worst first", "GPUs by node and state, the worst first"
CHANGES = "Changes of the last hour, the newest first"
FINDING = 'rank="2",group="0-1",node="node-a",gpu="2",uuid="GPU-2"'
WORDS = {
    "straggler": "Rank 2 (node-a, GPU 2) slows down run mine by 30%: its data is late",
    "hang": "Run mine hangs: Rank 2 (node-a, GPU 2) is stuck in backward",
    "crash": "Rank 2 (node-a, GPU 2) of run mine was killed",
}

Values = Mapping[int, float]
Series = dict[str, Values]
"""The values of each series by time."""


def always(value: float, until: int = NOW) -> Values:
    return {time: value for time in TIMES if time <= until}


def growing(rate: float, until: int = NOW, reset_at: int = NOW + 1) -> Values:
    """Return a counter, which starts again when its exporter does."""
    return {time: rate * (time - (reset_at if time >= reset_at else 0)) for time in TIMES if time <= until}


def node(name: str = "node-a", labels: str = EXPORTER, until: int = NOW, gpus: int = 2) -> Series:
    """Return a node whose exporter answers until then."""
    found: Series = {
        f"up{{{labels}": always(1, until) | {time: 0.0 for time in TIMES if time > until},
        f"rankscope_exporter_build_info{{{labels}": always(1, until),
        f"rankscope_exporter_time_seconds{{{labels}": {time: float(time) for time in TIMES if time <= until},
        f'rankscope_exporter_ranks_alive{{{labels},node="{name}"': always(2, until),
        f"rankscope_exporter_nvml_up{{{labels}": always(1, until),
        f"rankscope_exporter_gpus_expected{{{labels}": always(gpus, until),
        f"rankscope_exporter_gpus_seen{{{labels}": always(gpus, until),
        f"rankscope_exporter_gpus_released{{{labels}": always(0, until),
    }
    for gpu in range(gpus):
        own = f'{labels},gpu="{gpu}",uuid="{name}-{gpu}"'
        found[f"rankscope_gpu_up{{{own}"] = always(1, until)
        found[f'rankscope_gpu_state_info{{{own},state="working"'] = always(1, until)
    return found


def run(labels: str = RUN, until: int = NOW, *, ranks: int = 2, is_judged: bool = True) -> Series:
    """Return a run that began with the first scrape, and is shown until then."""
    found: Series = {}
    for rank in range(ranks):
        own = f'{labels},rank="{rank}"'
        found |= {
            f"rankscope_rank_up{{{own}": always(1, until),
            f"rankscope_rank_start_timestamp_seconds{{{own}": always(0, until),
            f'rankscope_rank_info{{{own},user="ada"': always(1, until),
        }
    account = {"none": 1.5, "straggler": 0.5}
    found |= {
        f'rankscope_run_gpu_seconds{{{labels},node="node-a",cause="{cause}"': growing(rate, until)
        for cause, rate in account.items()
    }
    if is_judged:
        found |= {
            f'rankscope_run_judged_info{{{labels},by="node-a"': always(1, until),
            f'rankscope_run_lost_ratio{{{labels},cause="none"': always(0.75, until),
            f'rankscope_run_lost_ratio{{{labels},cause="straggler"': always(0.25, until),
            f'rankscope_run_lost_gpu_seconds_total{{{labels},cause="straggler"': growing(0.5, until),
        }
    return found


def with_finding(kind: str, severity: str, since: int = NOW - 600) -> Series:
    """Return the run with this finding."""
    own = f'{RUN},kind="{kind}",cause="c",severity="{severity}",{FINDING}'
    open_for = {time: 0.3 for time in TIMES if time >= since}
    return {
        **node(),
        **run(),
        f"rankscope_finding_ratio{{{own}": open_for,
        f"rankscope_finding_since_timestamp_seconds{{{own}": dict.fromkeys(open_for, float(since)),
        f'rankscope_finding_info{{{own},summary="{WORDS[kind]}",evidence="e",advice="a"': dict.fromkeys(open_for, 1.0),
    }


OTHER = 'job="exporters",instance="b:10417",run="other",owner="1000"'
SICK = f'{EXPORTER},gpu="1",uuid="node-a-1"'
HEALTHY = {**node(), **run()}
FLEETS: dict[str, Series] = {
    "healthy": HEALTHY,
    "straggler": with_finding("straggler", "warning"),
    "hang": with_finding("hang", "critical"),
    "crash": with_finding("crash", "critical"),
    "two runs": {
        **with_finding("straggler", "warning"),
        **node("node-b", 'job="exporters",instance="b:10417"'),
        **run(OTHER),
    },
    "sick GPU": {
        **HEALTHY,
        f'rankscope_gpu_xid_last_timestamp_seconds{{{SICK},xid="79"': always(NOW - 300),
        f"rankscope_gpu_up{{{SICK}": always(0),
        f'rankscope_gpu_ecc_errors_total{{{SICK},kind="uncorrected",location="dram"': always(3),
        f'rankscope_gpu_throttled_seconds_total{{{EXPORTER},gpu="0",uuid="node-a-0",reason="hw_slowdown"': growing(0.9),
        f'rankscope_gpu_throttled_seconds_total{{{EXPORTER},gpu="0",uuid="node-a-0",reason="sw_power_cap"': growing(1),
        f'rankscope_gpu_info{{{EXPORTER},gpu="0",uuid="node-a-0",node="node-a"': always(1),
        f'rankscope_gpu_culprit_runs{{{EXPORTER},gpu="0",uuid="node-a-0",node="node-a"': always(2),
        'rankscope_gpu_culprit_runs{instance="analyzer",gpu="0",uuid="node-a-0",node="node-a"': always(1),
        f'rankscope_gpu_info{{{EXPORTER},gpu="2",uuid="node-a-2",node="node-a"': always(1),
        f'rankscope_gpu_culprit_runs{{{EXPORTER},gpu="2",uuid="node-a-2",node="node-a"': always(2),
    },
    "not judged": {**node(), **run(is_judged=False)},
    "not fully judged": {
        **HEALTHY,
        f'rankscope_analyzer_run_not_judged_info{{{RUN},reason="node_missing",node="node-b"': always(1),
    },
    "exporter down": {
        **node(until=NOW - 600),
        **run(until=NOW - 600),
        **node("node-b", 'job="exporters",instance="b:10417"'),
    },
    "no driver": {**node(), f"rankscope_exporter_nvml_up{{{EXPORTER}": always(0)},
    "nothing": {f"up{{{EXPORTER}": always(0)},
}


def series(fleet: Series) -> list[dict[str, str]]:
    return [
        {
            "series": f"{name}}}",
            "values": " ".join(f"{values[time]:.10g}" if time in values else "stale" for time in TIMES),
        }
        for name, values in fleet.items()
    ]


def expression(dashboard: str, panel: str, number: int = 0, price: str = "") -> str:
    found = panel_queries(interval="5m", time_range="1h", price=price)
    return [one.expr for one in found if (one.dashboard, one.panel) == (dashboard, panel)][number]


def error(fleet: Series, expr: str, expected: Mapping[str, float], tmp_path: Path) -> str:
    """Return promtool's error if the query has another result, else ''."""
    asked = {
        "expr": expr,
        "eval_time": f"{NOW}s",
        "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
    }
    test = {"interval": f"{INTERVAL}s", "input_series": series(fleet), "promql_expr_test": [asked]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": f"{INTERVAL}s", "tests": [test]}))
    found = subprocess.run(
        [servers.program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    return found.stdout + found.stderr if found.returncode else ""


def by(labels: str, expr: str) -> str:
    """Return the query with these labels only, whatever its value, which sorts the table."""
    return f"group by ({labels}) ({expr})"


def lines(*found: Mapping[str, str]) -> dict[str, float]:
    """Return the expected labels of a table's lines."""
    return {"{" + ",".join(f'{name}="{text}"' for name, text in one.items()) + "}": 1.0 for one in found}


FAILURE = "A rank was killed or ended with an exception"
NO_FINDING = "No open finding"
UNJUDGED = "No exporter or analyzer judges this run"
MINE = {"run": "mine", "owner": "1000"}


def found(kind: str, state: str) -> dict[str, str]:
    return {**MINE, "state": state, "summary": WORDS[kind], "rank": "2", "node": "node-a"}


STATES: dict[str, Sequence[dict[str, str]]] = {
    "healthy": [{**MINE, "state": "running", "summary": NO_FINDING}],
    "straggler": [found("straggler", "warning")],
    "hang": [found("hang", "hung")],
    "crash": [found("crash", "crashed")],
    "sick GPU": [{**MINE, "state": "running", "summary": NO_FINDING}],
    "two runs": [
        found("straggler", "warning"),
        {"run": "other", "owner": "1000", "state": "running", "summary": NO_FINDING},
    ],
    "not judged": [{**MINE, "state": "not judged", "summary": UNJUDGED}],
    "not fully judged": [{**MINE, "state": "incomplete", "summary": "A node of this run does not answer the analyzer"}],
    "exporter down": [
        {**MINE, "state": "not seen", "summary": "No exporter shows this run any more, and it had not ended"}
    ],
    "nothing": [{"summary": "No exporter shows a run"}],
}


@pytest.mark.parametrize("state", STATES)
def test_the_fleet_names_each_run_with_its_state_finding_and_rank(state: str, tmp_path: Path) -> None:
    expr = by("run, owner, state, summary, rank, node", expression("fleet", RUNS))
    assert error(FLEETS[state], expr, lines(*STATES[state]), tmp_path) == ""


def test_the_worst_run_is_first(tmp_path: Path) -> None:
    worst = f"topk(1, {expression('fleet', RUNS)})"
    for state in ("two runs", "not judged"):
        fleet = {**FLEETS[state], **run(OTHER), **node("node-b", 'job="exporters",instance="b:10417"')}
        assert error(fleet, by("run", worst), lines({"run": "mine"}), tmp_path) == ""


TILES = ("Critical", "Warning", "Not judged", "No answer", "Sick GPUs")
COUNTS: dict[str, Sequence[float | None]] = {
    "healthy": (0, 0, 0, 0, 0),
    "straggler": (0, 1, 0, 0, 0),
    "hang": (1, 0, 0, 0, 0),
    "crash": (1, 0, 0, 0, 0),
    "sick GPU": (0, 0, 0, 0, 2),
    "two runs": (0, 1, 0, 0, 0),
    "not judged": (None, None, 1, 0, 0),
    "not fully judged": (0, 0, 1, 0, 0),
    "exporter down": (None, None, None, 1, 0),
    "nothing": (None, None, None, 0, None),
}


@pytest.mark.parametrize("state", COUNTS)
def test_a_tile_is_zero_only_if_it_is_known(state: str, tmp_path: Path) -> None:
    for tile, count in zip(TILES, COUNTS[state], strict=True):
        expected = {} if count is None else {"{}": count}
        assert error(FLEETS[state], expression("fleet", tile), expected, tmp_path) == "", tile


def test_no_query_has_a_line_for_each_rank_or_gpu(tmp_path: Path) -> None:
    fleet = {**FLEETS["straggler"], **node(gpus=40), **run(ranks=40)}
    asked = [one for one in panel_queries(interval="5m", time_range="1h") if one.dashboard in {"fleet", "cost"}]
    assert len(asked) > 40
    expr = " or ".join(f'label_replace(count({one.expr}) > 10, "panel", "{one.panel}", "", "")' for one in asked)
    assert error(fleet, expr, {}, tmp_path) == ""


def test_the_loss_and_the_age_of_a_run(tmp_path: Path) -> None:
    own = '{run="mine",owner="1000"}'
    for number, value in enumerate((600, 0.25, 1.0), 1):
        assert error(FLEETS["straggler"], expression("fleet", RUNS, number), {own: value}, tmp_path) == ""
    assert error(HEALTHY, expression("fleet", RUNS, 1), {own: NOW}, tmp_path) == ""


COSTS = [
    (one.dashboard, one.panel, number)
    for number, one in enumerate(panel_queries())
    if one.dashboard in {"fleet", "cost"} and "scalar(vector(" in one.expr
]


@pytest.mark.parametrize(("dashboard", "panel", "number"), COSTS)
def test_there_is_a_cost_only_with_a_price(dashboard: str, panel: str, number: int, tmp_path: Path) -> None:
    with_price, without = ([*panel_queries(interval="5m", time_range="1h", price=p)][number].expr for p in ("2.5", ""))
    hours = re.sub(r"scalar\(vector\(2\.5 \+ 0\) > 0\)", "2.5", with_price)
    assert hours != with_price
    fleet = FLEETS["straggler"]
    assert error(fleet, f"({without}) or vector(-1)", {"{}": -1.0}, tmp_path) == ""
    assert error(fleet, f"absent({with_price}) or ({with_price}) != ({hours})", {}, tmp_path) == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("healthy", [{"node": "node-a", "exporter": "up"}]),
        ("exporter down", [{"node": "node-a", "exporter": "down"}, {"node": "node-b", "exporter": "up"}]),
        ("no driver", [{"node": "node-a", "exporter": "no driver"}]),
        ("nothing", [{"exporter": "none seen"}]),
    ],
)
def test_a_node_whose_exporter_is_down_is_shown_as_such(
    state: str, expected: Sequence[dict[str, str]], tmp_path: Path
) -> None:
    expr = by("node, exporter", expression("fleet", NODES))
    assert error(FLEETS[state], expr, lines(*expected), tmp_path) == ""


def test_the_gpus_of_an_exporter_that_is_down_are_not_shown_as_working(tmp_path: Path) -> None:
    expr = expression("fleet", NODES, 1)
    assert error(FLEETS["exporter down"], expr, {'{instance="b:10417"}': 2.0}, tmp_path) == ""


def test_each_fault_of_a_sick_gpu_is_named(tmp_path: Path) -> None:
    expr = by("node, gpu, fault", expression("fleet", "Sick GPUs", 1))
    faults = {
        "1": ("lost: it does not answer", "XID 79", "uncorrected memory errors"),
        "0": ("throttled: hw_slowdown", "culprit in several runs of the last week"),
    }
    expected = [{"node": "node-a", "gpu": gpu, "fault": text} for gpu, texts in faults.items() for text in texts]
    assert error(FLEETS["sick GPU"], expr, lines(*expected), tmp_path) == ""
    assert error(HEALTHY, expr, lines({"fault": "no exporter shows a sick GPU"}), tmp_path) == ""


def idle(gpu: int, holder: str) -> Series:
    own = f'{EXPORTER},gpu="{gpu}",uuid="node-a-{gpu}"'
    return {
        f'rankscope_gpu_state_info{{{own},state="working"': {},
        f'rankscope_gpu_state_info{{{own},state="process_no_work"': always(1),
        f"rankscope_gpu_last_busy_timestamp_seconds{{{own}": always(NOW - 900 * (gpu + 1)),
    } | ({f"rankscope_gpu_allocation_info{{{own},{holder}": always(1)} if holder else {})


def test_idle_gpus_are_counted_by_user_and_namespace(tmp_path: Path) -> None:
    holder = 'user="ada",k8s_namespace="ml"'
    own = '{user="ada",k8s_namespace="ml",state="process_no_work"}'
    fleet = {**HEALTHY, **idle(0, holder), **idle(1, holder)}
    for number, value in enumerate((2, 1800)):
        expr = expression("fleet", "Idle GPUs by user and namespace", number)
        assert error(fleet, expr, {own: value}, tmp_path) == ""
    unknown = {**HEALTHY, **idle(0, "")}
    expr = expression("fleet", "Idle GPUs by user and namespace")
    assert error(unknown, expr, {'{state="process_no_work"}': 1}, tmp_path) == ""


def ended(series: Iterable[str], at: int) -> Series:
    """Return what replaces these series of a run that ends."""
    ranks = [name.partition("{")[2] for name in series if name.startswith("rankscope_rank_up{")]
    after = [time for time in TIMES if at <= time < at + 600]
    found: Series = {}
    for own in ranks:
        found[f"rankscope_rank_up{{{own}"] = always(1, at - INTERVAL) | dict.fromkeys(after, 0.0)
        found[f"rankscope_rank_exit_timestamp_seconds{{{own}"] = dict.fromkeys(after, float(at))
        found[f'rankscope_rank_exit_info{{{own},reason="killed"'] = dict.fromkeys(after, 1.0)
    return found


def test_the_changes_of_the_last_hour(tmp_path: Path) -> None:
    began, end = NOW - 3000, NOW - 1500
    short = run(OTHER)
    starts = [name for name in short if name.startswith("rankscope_rank_start")]
    short |= {**dict.fromkeys(starts, always(began)), **ended(short, end)}
    short = {name: {time: value for time, value in values.items() if time >= began} for name, values in short.items()}
    fleet = {
        **with_finding("straggler", "warning"),
        **node("node-b", 'job="exporters",instance="b:10417"'),
        **node("node-c", 'job="exporters",instance="c:10417"', until=NOW - 300),
        **short,
    }
    expr = f"sum by (change, run, node, instance, summary) ({expression('fleet', CHANGES)})"
    on_a = 'node="node-a",instance="a:10417"'
    expected = {
        '{change="run started",run="other"}': 3000.0,
        f'{{change="run ended",run="other",summary="{FAILURE}"}}': 1500.0,
        f'{{change="finding opened",run="mine",{on_a},summary="{WORDS["straggler"]}"}}': 600.0,
        '{change="exporter down",node="node-c",instance="c:10417"}': 300.0,
    }
    assert error(fleet, expr, expected, tmp_path) == ""
    row = {"run": "other", "state": "ended", "summary": FAILURE}
    runs = by("run, state, summary", f"({expression('fleet', RUNS)}) < 1")
    assert error(fleet, runs, lines(row), tmp_path) == ""
    ages = expression("fleet", RUNS, 1)
    assert error(fleet, f"({ages}) == 1500", {'{run="other",owner="1000"}': 1500.0}, tmp_path) == ""


def restarted(*, is_saved: bool) -> Series:
    """Return the healthy fleet; its exporter restarts and has saved the accounts, or the run is followed by another."""
    fleet, at = dict(HEALTHY), NOW - 1500
    for name in fleet:
        is_account = name.startswith("rankscope_run_gpu_seconds")
        if name.startswith("rankscope_run_lost_gpu_seconds_total") or (is_account and not is_saved):
            fleet[name] = growing(fleet[name][NOW] / NOW, reset_at=at)
    return {name: {time: values[time] for time in values if not at < time < at + 300} for name, values in fleet.items()}


@pytest.mark.parametrize("fleet", [HEALTHY, restarted(is_saved=True), restarted(is_saved=False)])
def test_a_restart_does_not_distort_the_cost(fleet: Series, tmp_path: Path) -> None:
    for tile, value in {"GPU-hours": 2.0, "Hours lost": 0.5, "Lost": 0.25}.items():
        expr = f"abs({expression('cost', tile)} / {value} - 1) < bool 0.1"
        assert error(fleet, expr, {"{}": 1.0}, tmp_path) == "", tile


def test_the_cost_by_run_user_and_cause(tmp_path: Path) -> None:
    users = by("run, user", expression("cost", "By run", 6))
    causes = by("run, cause", expression("cost", "By run", 5))
    for expr, name, value in ((users, "user", "ada"), (causes, "cause", "straggler")):
        expected = lines({"run": "mine", name: value}, {"run": "other", name: value})
        assert error(FLEETS["two runs"], expr, expected, tmp_path) == ""
    assert error(FLEETS["two runs"], expression("cost", "By cause"), {'{cause="straggler"}': 1.0}, tmp_path) == ""
    by_user = expression("cost", "By user", 1)
    assert error(FLEETS["two runs"], by_user, {'{owner="1000",user="ada"}': 1.0}, tmp_path) == ""


def test_a_run_that_nothing_diagnoses_has_a_cost_but_no_loss(tmp_path: Path) -> None:
    fleet = FLEETS["not judged"]
    assert error(fleet, by("run", expression("cost", "By run")), lines({"run": "mine"}), tmp_path) == ""
    for number in (1, 2, 4, 5):
        assert error(fleet, expression("cost", "By run", number, price="2.5"), {}, tmp_path) == ""
    assert error(fleet, f"({expression('cost', 'Not judged')}) > bool 1", {"{}": 1.0}, tmp_path) == ""
    judged = {**node(), **run(is_judged=True)}
    assert error(judged, expression("cost", "Not judged"), {"{}": 0.0}, tmp_path) == ""


def test_a_gpu_is_throttled_for_at_most_all_of_the_time(tmp_path: Path) -> None:
    slowdown = f'rankscope_gpu_throttled_seconds_total{{{EXPORTER},gpu="0",uuid="node-a-0",reason="hw_slowdown"'
    throttled = f"max by (gpu) ({FAULTS['throttled']})".replace("$__rate_interval", "5m")
    assert error({**node(), slowdown: growing(1.1)}, throttled, {'{gpu="0"}': 1.0}, tmp_path) == ""
