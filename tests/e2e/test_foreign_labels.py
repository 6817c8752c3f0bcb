"""A slow rank is notified once, also with the labels of a Prometheus operator and a replaced exporter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import yaml
from deploy.prometheus import fast
from examples.demo.job import Job
from testing import servers
from testing.stack import Stack, wait_for

RUN = "labeled"
FOREIGN = {"namespace": "monitoring", "container": "exporter", "service": "gpus", "endpoint": "metrics"}
LAG = f'rankscope_rank_lag_ratio{{run="{RUN}"}}'


def write_targets(directory: Path, pod: str, address: str) -> None:
    """Write the targets that an operator's Prometheus discovers for this pod."""
    (directory / "targets.yml").write_text(yaml.safe_dump([{"targets": [address], "labels": {**FOREIGN, "pod": pod}}]))


def prometheus_config(directory: Path) -> ModuleType:
    """Return the configuration of the fast speed, with another job name and discovered targets."""

    def config(_: object, alertmanager: str | None = None) -> str:
        document = yaml.safe_load(fast.prometheus_config([], alertmanager))
        discovery = [{"files": [str(directory / "targets.yml")], "refresh_interval": "1s"}]
        document["scrape_configs"] = [{"job_name": "podMonitor/monitoring/gpus/0", "file_sd_configs": discovery}]
        return yaml.safe_dump(document, sort_keys=False)

    return cast(ModuleType, SimpleNamespace(prometheus_config=config, alertmanager_config=fast.alertmanager_config))


def test_a_slow_rank_is_notified_once_with_foreign_labels_and_a_replaced_exporter(
    tmp_path: Path, run_dir: Path
) -> None:
    before, after = (servers.exporter(tmp_path, "4", run_dir, name) for name in ("before", "after"))
    write_targets(tmp_path, "exporter-abc", before.address)
    job = Job(tmp_path, RUN, run_dir)
    with Stack(tmp_path, [before], speed=prometheus_config(tmp_path)) as stack:
        try:
            job.start()
            assert wait_for(lambda: len(stack.prometheus.query(LAG)) == 4, 90), job.output
            job.begin_extra_work()
            notification = stack.notified("RankscopeRankZeroLagging", within=60)
            assert notification is not None
            assert (notification.labels["rank"], notification.labels["cause"]) == ("0", "other")
            assert not notification.labels.keys() & {*FOREIGN, "pod"}
            after.start()
            before.stop()
            write_targets(tmp_path, "exporter-xyz", after.address)
            new_ranks = f'rankscope_rank_up{{pod="exporter-xyz",run="{RUN}"}}'
            assert wait_for(lambda: len(stack.prometheus.query(new_ranks)) == 4, 30)
            assert wait_for(lambda: not stack.prometheus.query('rankscope_rank_up{pod="exporter-abc"}'), 30)
            assert wait_for(lambda: len(stack.prometheus.query(LAG)) == 4, 30)
            job.end_extra_work()
            assert wait_for(lambda: not all(n.is_firing for n in stack.webhook.notifications), 90)
            assert [n.name for n in stack.webhook.firing()] == ["RankscopeRankZeroLagging"]
        finally:
            job.kill()
            after.stop()
