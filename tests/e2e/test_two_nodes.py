"""One job on two nodes with an exporter each, and an analyzer: the ranks of both nodes are compared, with one alert."""

from __future__ import annotations

from pathlib import Path

from examples.demo.job import Job
from testing import servers
from testing.stack import Stack, wait_for

RUN = "two-nodes"


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
            steps = "sum by (instance) (rankscope_rank_steps_total) > 2"
            assert wait_for(lambda: len(stack.prometheus.query(steps)) == 2, 90), jobs[0].output
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
