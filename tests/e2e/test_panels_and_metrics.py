"""A real run with every kind of fault: each panel's query has data, and /metrics is valid for Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from examples.demo.job import Job
from testing import servers
from testing.job.launch import TrainingJob
from testing.stack import Stack, wait_for
from testing.sysfs import interface, port

from rankscope_dashboards.queries import PanelQuery, panel_queries
from rankscope_exporter.analyzer import metrics as analyzer
from rankscope_exporter.registry import GPU_COLLECTORS

RUN = "troubled"
OTHER_RUN = "compared"
SCENARIO = """
gpus: 5
follow_ranks: true
timeline:
  3:
    - {at: 6, throttle: [sw_thermal_slowdown], temperature: 88}
    - {at: 8, xid: 13}
"""


@dataclass
class FaultyRun:
    """The stack after the run has ended, and the run's start (Unix time)."""

    stack: Stack
    began: float
    metrics: str
    """The exporter's page while the run was alive."""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def set_network_counters(sysfs: Path, count: int) -> None:
    """Set the counters of a network port and of an interface: words, errors, dropped packets."""
    port(sysfs, "mlx5_0", data=count, errors={"symbol_error": count})
    interface(sysfs, "eth0", rx_dropped=count)


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRun]:
    """Run a job whose rank 0 lags, with throttling and an XID error, until rank 2 is killed; and another job."""
    directory = tmp_path_factory.mktemp("stack")
    (directory / "scenario.yml").write_text(SCENARIO)
    flags = [f"--path.sysfs={directory / 'sys'}", f"--capture-dir={directory / 'captures'}"]
    exporter = servers.exporter(directory, str(directory / "scenario.yml"), directory, flags=flags)
    set_network_counters(directory / "sys", 0)
    job = TrainingJob(directory / "job", RUN, directory)
    other = Job(directory, OTHER_RUN, directory, ranks=1, first_rank=4)
    with Stack(directory, [exporter]) as stack:
        began = time.time()
        job.start(
            checkpoint_every=10, forward=15, backward=25, micro_steps=2, small_collectives=1, collect_every=5, collect=1
        )
        other.start()
        try:
            assert wait_for(lambda: len(stack.prometheus.query("rankscope_rank_steps_total > 1")) == 5, 90), job.output
            job.change(ranks={0: {"post": 60}})
            set_network_counters(directory / "sys", 1_000)
            assert stack.notified("RankscopeRankZeroLagging", within=30)
            settings = f'rankscope_rank_settings_info{{run="{OTHER_RUN}"}}'
            assert wait_for(lambda: stack.prometheus.query(settings), 30)
            metrics = get(f"{exporter.url}/metrics")
            job.kill(2)
            assert stack.notified("RankscopeRankCrashed", within=30)
        finally:
            job.terminate()
            other.kill()
        yield FaultyRun(stack, began, metrics)


def series_of(faulty_run: FaultyRun, expression: str) -> list[dict[str, Any]]:
    """Return the series with a value of a query over the whole life of the run."""
    span = {"query": expression, "start": faulty_run.began, "end": time.time(), "step": 1}
    url = f"{faulty_run.stack.prometheus.url}/api/v1/query_range?{urllib.parse.urlencode(span)}"
    found: list[dict[str, Any]] = json.loads(get(url))["data"]["result"]
    return [series for series in found if any(value != "NaN" for _, value in series["values"])]


def queries(faulty_run: FaultyRun) -> list[PanelQuery]:
    instance = faulty_run.stack.exporters[0].address
    values = {"run": RUN, "owner": str(os.getuid()), "compare": OTHER_RUN, "instance": instance}
    return list(
        panel_queries(**values, interval="4s", price="2.5", time_range=f"{time.time() - faulty_run.began:.0f}s")
    )


def test_every_panel_about_a_run_or_a_node_has_data(faulty_run: FaultyRun) -> None:
    panels = [query for query in queries(faulty_run) if query.dashboard in {"run", "node"}]
    empty = [query for query in panels if not series_of(faulty_run, query.expr)]
    assert empty == [query for query in panels if query.needs_cuda or query.rare]


def test_every_panel_about_all_runs_has_data(faulty_run: FaultyRun) -> None:
    panels = [query for query in queries(faulty_run) if query.dashboard in {"fleet", "cost"}]
    assert len(panels) > 40
    assert [one for one in panels if not one.needs_fault and not series_of(faulty_run, one.expr)] == []


def test_the_comparison_shows_both_runs(faulty_run: FaultyRun) -> None:
    comparisons = [query for query in queries(faulty_run) if OTHER_RUN in query.expr]
    runs = {query: {series["metric"]["run"] for series in series_of(faulty_run, query.expr)} for query in comparisons}
    tokens = [query for query in comparisons if "rankscope_rank_tokens_total" in query.expr]  # which digits has not
    assert len(comparisons) > len(tokens) == 1
    assert {query: found for query, found in runs.items() if found != {RUN, OTHER_RUN}} == {
        query: {RUN} for query in tokens
    }


def test_a_killed_rank_causes_one_notification_that_names_it(faulty_run: FaultyRun) -> None:
    time.sleep(5)  # its peers end within a second; alerts that they cause would have fired by now
    crashes = [n for n in faulty_run.stack.webhook.firing() if n.name == "RankscopeRankCrashed"]
    assert {(n.labels["rank"], n.labels["reason"]) for n in crashes} == {("2", "killed")}
    others = {n.name for n in faulty_run.stack.webhook.firing()}
    assert others == {"RankscopeRankZeroLagging", "RankscopeRankCrashed", "RankscopeGpuXid"}


def test_promtool_accepts_the_metrics(faulty_run: FaultyRun) -> None:
    assert 'rankscope_rank_step_seconds_bucket{le="0.1"' in faulty_run.metrics
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=faulty_run.metrics, capture_output=True, text=True, check=False
    )
    assert checked.stdout + checked.stderr == ""
    assert checked.returncode == 0


def test_exported_and_documented_metrics_are_the_same(faulty_run: FaultyRun) -> None:
    documented = {
        line.split("`")[1]
        for line in Path("docs/metrics.md").read_text().splitlines()
        if line.startswith("| `rankscope_")
    }
    exported = {line.split()[2] for line in faulty_run.metrics.splitlines() if line.startswith("# TYPE")}
    off = {metric.name for collector in GPU_COLLECTORS if not collector.is_on for metric in collector.metrics}
    ended_only = {"rankscope_rank_exit_info", "rankscope_rank_exit_timestamp_seconds"}
    of_analyzer = {metric.name for metric in analyzer.METRICS}
    assert exported == documented - off - of_analyzer
    assert ended_only <= documented
