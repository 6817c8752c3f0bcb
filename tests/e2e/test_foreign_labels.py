"""A Prometheus operator's labels on a real job's series, and an exporter that is replaced: the same is told, once."""

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
LIVING = f'rank:rankscope_rank_info:live{{run="{RUN}"}}'
LAG = f'rank:rankscope_lag:ratio{{run="{RUN}"}}'


def operators(directory: Path, pod: str, address: str) -> None:
    """What an operator's Prometheus finds when this pod is there."""
    (directory / "targets.yml").write_text(yaml.safe_dump([{"targets": [address], "labels": {**FOREIGN, "pod": pod}}]))


def prometheus_config(directory: Path) -> ModuleType:
    """The fast speed, with another name for the job and targets that come and go."""

    def config(_: object, alertmanager: str | None = None) -> str:
        document = yaml.safe_load(fast.prometheus_config([], alertmanager))
        found = [{"files": [str(directory / "targets.yml")], "refresh_interval": "1s"}]
        document["scrape_configs"] = [{"job_name": "podMonitor/monitoring/gpus/0", "file_sd_configs": found}]
        return yaml.safe_dump(document, sort_keys=False)

    return cast(ModuleType, SimpleNamespace(prometheus_config=config, alertmanager_config=fast.alertmanager_config))


def test_with_an_operators_labels_and_a_replaced_exporter_a_slow_rank_is_told_once(
    tmp_path: Path, run_dir: Path
) -> None:
    before, after = (servers.exporter(tmp_path, "4", run_dir, name) for name in ("before", "after"))
    operators(tmp_path, "exporter-abc", before.address)
    job = Job(tmp_path, RUN, run_dir)
    with Stack(tmp_path, [before], speed=prometheus_config(tmp_path)) as stack:
        try:
            job.start()
            assert wait_for(lambda: len(stack.prometheus.query(LAG)) == 4, 90), job.output
            job.begin_extra_work()
            told = stack.notified("RankscopeRankZeroLagging", within=60)
            assert told is not None
            assert (told.labels["rank"], told.labels["cause"]) == ("0", "other")
            assert not told.labels.keys() & {*FOREIGN, "pod"}
            after.start()
            before.stop()
            operators(tmp_path, "exporter-xyz", after.address)
            of_the_successor = f'rankscope_rank_up{{pod="exporter-xyz",run="{RUN}"}}'
            assert wait_for(lambda: len(stack.prometheus.query(of_the_successor)) == 4, 30)
            assert wait_for(lambda: not stack.prometheus.query('rankscope_rank_up{pod="exporter-abc"}'), 30)
            assert wait_for(lambda: len(stack.prometheus.query(LIVING)) == len(stack.prometheus.query(LAG)) == 4, 30)
            job.end_extra_work()
            assert wait_for(lambda: not all(n.is_firing for n in stack.webhook.notifications), 90)
            assert [n.name for n in stack.webhook.firing()] == ["RankscopeRankZeroLagging"]
        finally:
            job.kill()
            after.stop()
