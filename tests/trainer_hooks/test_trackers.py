"""The run of an experiment tracker in the record. `make trackers` tests the same with the real libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from testing.clock import Clock
from testing.own_record import fail

from rankscope.guard import Guard
from rankscope.record.text import LABEL_LIMIT
from rankscope.trackers import INTERVAL, TrackerRun, Trackers

Load = Callable[..., ModuleType]


class Fixture:
    """Trackers with a simulated clock, and the calls of their listeners."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.changes = 0
        self.runs: list[tuple[str, TrackerRun]] = []
        guard = Guard("trackers", fail)
        self.trackers = Trackers(guard, self._count, lambda *found: self.runs.append(found), self.clock)

    def _count(self) -> None:
        self.changes += 1

    def look(self) -> tuple[dict[str, str], dict[str, str]]:
        self.clock.advance(INTERVAL)
        self.trackers.poll()
        return self.trackers.ids, self.trackers.urls


@pytest.fixture
def found() -> Any:
    fixture = Fixture()
    yield fixture
    fixture.trackers.remove()


class WandbRun:
    """The part of an online W&B run that the hook reads."""

    disabled = offline = False
    id = "x1"
    url: Any = "https://wandb.ai/team/project/runs/x1"

    def __init__(self, **attributes: Any) -> None:
        self.summary: dict[str, Any] = {}
        self._attach_pid = os.getpid()
        vars(self).update(attributes)

    def log(self, values: object) -> None:
        """Do nothing."""


class OfflineRun(WandbRun):
    """A run that prints a warning if its URL is read."""

    offline = True

    @property
    def url(self) -> str:
        raise AssertionError


class ParentsRun(WandbRun):
    """A run of the parent, whose attributes would connect to W&B's service in a forked child."""

    def __init__(self) -> None:
        super().__init__(_attach_pid=os.getpid() + 1)

    def __getattribute__(self, name: str) -> Any:
        assert name.startswith("_"), name
        return super().__getattribute__(name)


def mlflow(load: Load, uri: str, run_id: str | None = "7f") -> None:
    info = SimpleNamespace(run_id=run_id, experiment_id="3")
    run = SimpleNamespace(info=info) if run_id else None
    load("mlflow", active_run=lambda: run, get_tracking_uri=lambda: uri)


class SummaryWriter:
    """The part of torch's writer that the hook reads and watches."""

    def __init__(self, log_dir: Any) -> None:
        self.log_dir = log_dir
        self.all_writers: dict[str, object] | None = {}

    def _get_file_writer(self) -> None:
        """Do nothing. All methods that write call this."""

    def close(self) -> None:
        self.all_writers = None


def test_without_a_tracker_nothing_is_found_or_imported(found: Fixture) -> None:
    before = set(sys.modules)
    assert found.look() == ({}, {})
    assert set(sys.modules) == before
    assert found.changes == 0


def test_a_run_of_wandb_has_an_id_and_a_page(found: Fixture, load: Load) -> None:
    load("wandb", run=WandbRun())
    assert found.look() == ({"wandb": "x1"}, {"wandb": "https://wandb.ai/team/project/runs/x1"})
    assert found.changes == 1


def test_a_tracker_that_starts_after_the_hook_is_found_and_one_that_ends_is_kept(found: Fixture, load: Load) -> None:
    module = load("wandb", run=None)
    assert found.look() == ({}, {})
    module.run = WandbRun()
    assert found.look()[0] == {"wandb": "x1"}
    module.run = None
    assert found.look()[0] == {"wandb": "x1"}
    module.run = WandbRun(id="x2", url="https://wandb.ai/x2")
    assert found.look() == ({"wandb": "x2"}, {"wandb": "https://wandb.ai/x2"})
    assert found.changes == 2


def test_runs_are_looked_for_once_per_interval_and_the_url_is_read_once(found: Fixture, load: Load) -> None:
    reads = []

    class Run(WandbRun):
        @property
        def url(self) -> str:
            reads.append(1)
            return "https://wandb.ai/x1"

    module = load("wandb", run=Run())
    for _ in range(3):
        found.look()
    assert reads == [1]
    module.run = WandbRun(id="x2")
    found.clock.advance(INTERVAL - 0.1)
    found.trackers.poll()
    assert found.trackers.ids == {"wandb": "x1"}


def test_an_offline_run_has_no_page_and_its_url_is_not_read(found: Fixture, load: Load) -> None:
    load("wandb", run=OfflineRun())
    assert found.look() == ({"wandb": "x1"}, {"wandb": ""})


class StandIn:
    """A stand-in of a disabled W&B: every attribute is another stand-in."""

    def __getattr__(self, name: str) -> StandIn:
        return self

    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize("run", [WandbRun(disabled=True), ParentsRun(), StandIn(), WandbRun(id=None), WandbRun(id="")])
def test_an_invalid_run_or_one_of_the_parent_is_not_shown(found: Fixture, load: Load, run: object) -> None:
    load("wandb", run=run)
    assert found.look() == ({}, {})


def test_a_run_that_is_not_the_global_one_is_found_when_the_job_logs_to_it(found: Fixture, load: Load) -> None:
    class Run(WandbRun):
        def log(self, values: object) -> None:
            """Do nothing."""

    load("wandb", run=None)
    load("wandb.sdk.wandb_run", Run=Run)
    run = Run()
    found.look()
    run.log({})
    assert found.look()[0] == {"wandb": "x1"}


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("http://mlflow:5000/", "http://mlflow:5000/#/experiments/3/runs/7f"),
        ("https://user:secret@mlflow/base?token=secret", "https://mlflow/base/#/experiments/3/runs/7f"),
        ("sqlite:///mlflow.db", ""),
        ("file:///work/mlruns", ""),
        ("databricks", ""),
    ],
)
def test_the_active_run_of_mlflow_has_its_page_on_a_tracking_server(
    found: Fixture, load: Load, uri: str, url: str
) -> None:
    mlflow(load, uri)
    assert found.look() == ({"mlflow": "7f"}, {"mlflow": url})


def test_the_run_of_lightnings_logger_is_found_when_it_logs(found: Fixture, load: Load) -> None:
    class MLFlowLogger:
        _run_id, _experiment_id, _tracking_uri = "8a", "4", "http://mlflow:5000"

        def log_metrics(self) -> None:
            """Do nothing."""

    mlflow(load, "", run_id=None)
    load("lightning.pytorch.loggers.mlflow", MLFlowLogger=MLFlowLogger)
    logger = MLFlowLogger()
    found.look()
    logger.log_metrics()
    assert found.look() == ({"mlflow": "8a"}, {"mlflow": "http://mlflow:5000/#/experiments/4/runs/8a"})


def test_a_summary_writer_is_found_at_the_next_poll_after_it_writes(found: Fixture, load: Load) -> None:
    load("torch.utils.tensorboard.writer", SummaryWriter=SummaryWriter)
    writer = SummaryWriter("runs/a")  # before the hook watches
    found.look()
    writer._get_file_writer()
    found.trackers.poll()
    assert (found.trackers.ids, found.trackers.urls) == ({"tensorboard": "runs/a"}, {"tensorboard": ""})


def test_the_first_of_several_writers_is_used_until_it_is_closed_or_freed(found: Fixture, load: Load) -> None:
    load("torch.utils.tensorboard.writer", SummaryWriter=SummaryWriter)
    found.look()
    first, second, third = (SummaryWriter(name) for name in ("a", "b", "c"))

    def written() -> dict[str, str]:
        for writer in (first, second, third):
            if writer is not None:
                writer._get_file_writer()
        found.look()
        return dict(found.trackers.ids)

    assert written() == written() == {"tensorboard": "a"}
    first.close()
    first = None
    found.look()
    assert written() == {"tensorboard": "b"}
    second = None
    found.look()
    assert written() == {"tensorboard": "c"}
    assert found.changes == 3


@pytest.mark.parametrize(
    ("log_dir", "shown"),
    [
        ("s3://key:secret@bucket/runs", "s3://bucket/runs"),
        ("runs/a\nb", "runs/a?b"),
        ("x" * 500 + "/last", ("x" * 500 + "/last")[-LABEL_LIMIT:]),
    ],
)
def test_a_log_directory_is_shown_without_passwords_on_one_line(
    found: Fixture, load: Load, log_dir: str, shown: str
) -> None:
    load("torch.utils.tensorboard.writer", SummaryWriter=SummaryWriter)
    found.look()
    writer = SummaryWriter(log_dir)
    writer._get_file_writer()
    assert found.look()[0] == {"tensorboard": shown}


@pytest.mark.parametrize("url", ["javascript:alert(1)", "https://wandb.ai/" + "x" * 200, 'https://w/"><b', None])
def test_a_url_that_is_not_a_valid_link_is_omitted(found: Fixture, load: Load, url: str | None) -> None:
    load("wandb", run=WandbRun(url=url))
    assert found.look() == ({"wandb": "x1"}, {"wandb": ""})


def test_a_tracker_that_raises_does_not_affect_another_and_is_read_again(found: Fixture, load: Load) -> None:
    class Broken(WandbRun):
        @property
        def id(self) -> str:
            raise RuntimeError

    module = load("wandb", run=Broken())
    mlflow(load, "http://mlflow:5000")
    assert found.look()[0] == {"mlflow": "7f"}
    module.run = WandbRun()
    assert found.look()[0] == {"mlflow": "7f", "wandb": "x1"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_partially_imported_or_unrelated_module_is_ignored(found: Fixture, load: Load, name: str) -> None:
    load(name)
    assert found.look() == ({}, {})


def test_attributes_that_a_module_would_import_are_not_read(found: Fixture, load: Load) -> None:
    def imports(name: str) -> None:
        raise AssertionError(name)

    load("mlflow", __getattr__=imports)
    load("wandb", __getattr__=imports)
    assert found.look() == ({}, {})


def test_patched_methods_are_restored(found: Fixture, load: Load) -> None:
    load("torch.utils.tensorboard.writer", SummaryWriter=SummaryWriter)
    before = vars(SummaryWriter)["_get_file_writer"]
    found.look()
    assert vars(SummaryWriter)["_get_file_writer"] is not before
    found.trackers.remove()
    assert vars(SummaryWriter)["_get_file_writer"] is before


def test_a_new_rank_starts_without_the_runs_of_the_last_one(found: Fixture, load: Load) -> None:
    module = load("wandb", run=WandbRun())
    found.look()
    module.run = None
    found.trackers.restart()
    assert found.look() == ({}, {})


def test_the_record_has_the_run(attached: Any, load: Load) -> None:
    import torch
    from testing.own_record import snapshot

    load("wandb", run=WandbRun())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert snapshot().info["tracker_ids"] == {"wandb": "x1"}
    assert snapshot().info["tracker_urls"] == {"wandb": "https://wandb.ai/team/project/runs/x1"}
