"""After a real run with every kind of trouble: each panel's query has data, and /metrics is as Prometheus wants it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from examples.demo import servers
from examples.demo.job import Job
from examples.demo.stack import Stack, wait_for

from rankscope_dashboards.queries import PanelQuery, panel_queries
from rankscope_exporter.collectors import GPU_SOURCES

RUN = "troubled"
SCENARIO = """
gpus: 4
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


def pid_of_rank(stack: Stack, rank: int) -> int:
    (series,) = stack.prometheus.query(f'rankscope_rank_info{{run="{RUN}",rank="{rank}"}}')
    return int(series["metric"]["pid"])


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    """A run whose rank 0 lags, on a GPU that throttles and reports an XID, until rank 2 is killed."""
    directory = tmp_path_factory.mktemp("stack")
    (directory / "scenario.yml").write_text(SCENARIO)
    exporter = servers.exporter(directory, str(directory / "scenario.yml"), directory)
    job = Job(directory, RUN, directory)
    with Stack(directory, [exporter]) as stack:
        began = time.time()
        job.start()
        try:
            assert wait_for(lambda: len(stack.prometheus.query("rankscope_rank_steps_total > 1")) == 4, 90), job.output
            job.begin_extra_work()
            assert stack.notified("RankscopeRankZeroLagging", within=30)
            metrics = get(f"{exporter.url}/metrics")
            os.kill(pid_of_rank(stack, 2), signal.SIGKILL)
            assert stack.notified("RankscopeRankCrashed", within=30)
        finally:
            job.kill()
        yield Aftermath(stack, began, metrics)


def has_data(aftermath: Aftermath, expression: str) -> bool:
    span = {"query": expression, "start": aftermath.began, "end": time.time(), "step": 1}
    url = f"{aftermath.stack.prometheus.url}/api/v1/query_range?{urllib.parse.urlencode(span)}"
    answer: dict[str, Any] = json.loads(get(url))
    return any(value != "NaN" for series in answer["data"]["result"] for _, value in series["values"])


def test_every_panel_of_both_dashboards_has_data(aftermath: Aftermath) -> None:
    instance = aftermath.stack.exporters[0].address
    queries: list[PanelQuery] = list(panel_queries(run=RUN, instance=instance, interval="4s"))
    assert {query.dashboard for query in queries} == {"run", "node"}
    empty = [(query.dashboard, query.panel, query.expr) for query in queries if not has_data(aftermath, query.expr)]
    assert empty == []


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
    off = {metric.name for source in GPU_SOURCES if not source.is_on for metric in source.metrics}
    ended_only = {"rankscope_rank_exit_info", "rankscope_rank_exit_timestamp_seconds"}
    assert served == documented - off
    assert ended_only <= documented
