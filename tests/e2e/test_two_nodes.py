"""One job on two nodes with an exporter each, and an analyzer: it compares the ranks of both nodes, with one alert."""

from __future__ import annotations

import time
from pathlib import Path

from examples.demo.job import Job
from testing import servers
from testing.stack import Stack, wait_for

RUN = "two-nodes"
HEALTHY = 10.0
"""Seconds in which a false finding would be open."""


def test_a_lagging_rank_is_found_among_the_ranks_of_both_nodes(tmp_path: Path) -> None:
    run_dirs = [tmp_path / "node-0", tmp_path / "node-1"]
    for run_dir in run_dirs:
        run_dir.mkdir()
    exporters = [servers.exporter(tmp_path, "4", run_dir, run_dir.name) for run_dir in run_dirs]
    exporters.append(servers.analyzer(tmp_path, [exporter.address for exporter in exporters]))
    # Both nodes' jobs read their faults from the same directory; only the records are separate.
    jobs = [Job(tmp_path, RUN, run_dir, ranks=2, first_rank=2 * node) for node, run_dir in enumerate(run_dirs)]
    port = servers.free_port()
    with Stack(tmp_path, exporters) as stack:
        try:
            for node, job in enumerate(jobs):
                job.start("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
            judged = f'rankscope_run_judged_info{{run="{RUN}"}}'
            assert wait_for(lambda: stack.prometheus.query(judged), 120), jobs[0].output.read_text()
            time.sleep(HEALTHY)
            assert not stack.prometheus.query(f'rankscope_finding_ratio{{run="{RUN}"}}')
            (only_the_analyzer,) = {one["metric"]["instance"] for one in stack.prometheus.query(judged)}
            assert only_the_analyzer == exporters[-1].address
            (ranks,) = stack.prometheus.query(f'rankscope_analyzer_run_ranks{{run="{RUN}"}}')
            assert ranks["value"][1] == "4"
            jobs[0].begin_extra_work()
            notification = stack.notified("RankscopeRankZeroLagging", within=40)
            assert notification is not None
            assert notification.labels["rank"] == "0"
            assert notification.labels["group"] == "0-3"
            assert notification.labels["cause"] == "other"
            assert [n.name for n in stack.webhook.firing()] == ["RankscopeRankZeroLagging"]
        finally:
            for job in jobs:
                job.kill()
