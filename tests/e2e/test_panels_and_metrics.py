"""After a real run with every kind of trouble: each panel's query has data, and /metrics is as Prometheus wants it."""

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
class Aftermath:
    """The stack after the run has ended, and when it began (unix seconds)."""

    stack: Stack
    began: float
    metrics: str
    """The exporter's body while the run was alive."""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def carry(sysfs: Path, count: int) -> None:
    """Set the counters of a network port and of an interface: words, errors, dropped packets."""
    port(sysfs, "mlx5_0", data=count, errors={"symbol_error": count})
    interface(sysfs, "eth0", rx_dropped=count)


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    """A run whose rank 0 lags, on a GPU that throttles and reports an XID, until rank 2 is killed; and another run."""
    directory = tmp_path_factory.mktemp("stack")
    (directory / "scenario.yml").write_text(SCENARIO)
    flags = [f"--path.sysfs={directory / 'sys'}"]
    exporter = servers.exporter(directory, str(directory / "scenario.yml"), directory, flags=flags)
    carry(directory / "sys", 0)
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
            carry(directory / "sys", 1_000)
            assert stack.notified("RankscopeRankZeroLagging", within=30)
            settings = f'rankscope_rank_settings_info{{run="{OTHER_RUN}"}}'
            assert wait_for(lambda: stack.prometheus.query(settings), 30)
            metrics = get(f"{exporter.url}/metrics")
            job.kill(2)
            assert stack.notified("RankscopeRankCrashed", within=30)
        finally:
            job.terminate()
            other.kill()
        yield Aftermath(stack, began, metrics)


def answer(aftermath: Aftermath, expression: str) -> list[dict[str, Any]]:
    """The series of a query over the whole life of the run that have a value."""
    span = {"query": expression, "start": aftermath.began, "end": time.time(), "step": 1}
    url = f"{aftermath.stack.prometheus.url}/api/v1/query_range?{urllib.parse.urlencode(span)}"
    found: list[dict[str, Any]] = json.loads(get(url))["data"]["result"]
    return [series for series in found if any(value != "NaN" for _, value in series["values"])]


def queries(aftermath: Aftermath) -> list[PanelQuery]:
    instance = aftermath.stack.exporters[0].address
    return list(panel_queries(run=RUN, owner=str(os.getuid()), compare=OTHER_RUN, instance=instance, interval="4s"))


def test_every_panel_of_both_dashboards_has_data(aftermath: Aftermath) -> None:
    asked = queries(aftermath)
    assert {query.dashboard for query in asked} == {"run", "node"}
    empty = [query for query in asked if not answer(aftermath, query.expr)]
    assert empty == [query for query in asked if query.needs_cuda]


def test_the_comparison_shows_both_runs(aftermath: Aftermath) -> None:
    asked = [query for query in queries(aftermath) if OTHER_RUN in query.expr]
    runs = {query: {series["metric"]["run"] for series in answer(aftermath, query.expr)} for query in asked}
    digits_have_no_tokens = [query for query in asked if "rankscope_rank_tokens_total" in query.expr]
    assert len(asked) > len(digits_have_no_tokens) == 1
    assert {query: found for query, found in runs.items() if found != {RUN, OTHER_RUN}} == {
        query: {RUN} for query in digits_have_no_tokens
    }


def test_one_killed_rank_is_one_notification_that_names_it(aftermath: Aftermath) -> None:
    time.sleep(5)  # its peers end within a second: whatever they cause would be here by now
    crashes = [n for n in aftermath.stack.webhook.firing() if n.name == "RankscopeRankCrashed"]
    assert {(n.labels["rank"], n.labels["reason"]) for n in crashes} == {("2", "killed")}
    others = {n.name for n in aftermath.stack.webhook.firing()}
    assert others == {"RankscopeRankZeroLagging", "RankscopeRankCrashed", "RankscopeGpuXid"}


def test_promtool_has_no_complaint_about_the_metrics(aftermath: Aftermath) -> None:
    assert 'rankscope_rank_step_seconds_bucket{le="0.1"' in aftermath.metrics
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=aftermath.metrics, capture_output=True, text=True, check=False
    )
    assert checked.stdout + checked.stderr == ""
    assert checked.returncode == 0


def test_every_metric_is_documented_and_every_documented_metric_exists(aftermath: Aftermath) -> None:
    documented = {
        line.split("`")[1]
        for line in Path("docs/metrics.md").read_text().splitlines()
        if line.startswith("| `rankscope_")
    }
    served = {line.split()[2] for line in aftermath.metrics.splitlines() if line.startswith("# TYPE")}
    off = {metric.name for collector in GPU_COLLECTORS if not collector.is_on for metric in collector.metrics}
    ended_only = {"rankscope_rank_exit_info", "rankscope_rank_exit_timestamp_seconds"}
    assert served == documented - off
    assert ended_only <= documented
