"""A GPU that is throttled in run after run alerts; a healthy one does not, nor that of a rank with a slow script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testing import servers
from testing.exporter_process import metrics
from testing.job.control import Behavior
from testing.job.launch import RANKS, TrainingJob
from testing.stack import Stack, wait_for
from validation.gauntlet.arena import THRESHOLDS

from rankscope.cli import launch

# As the demo: real jobs that need the CPUs.
pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("shipped")]

ALERT = "RankscopeGpuFaultRecurring"
SLOW = {"forward": Behavior.forward + 30, "backward": Behavior.backward + 60}
SICK, INNOCENT = 2, 1
"""The rank whose GPU is throttled, and the one whose script is slow."""


class Node:
    """A node with an exporter and its state directory, on which one run follows another."""

    def __init__(self, directory: Path, run_dir: Path) -> None:
        self.changes, self.state = directory / "gpus", directory / "state"
        self.changes.mkdir()
        self.state.mkdir()
        scenario = {"gpus": RANKS, "follow_ranks": True, "changes_dir": str(self.changes)}
        flags = [f"--state-dir={self.state}", f"--collector.findings.thresholds={THRESHOLDS}", "--node=node-a"]
        self.exporter = servers.exporter(directory, scenario, run_dir, flags=flags)
        self._directory, self._run_dir = directory, run_dir

    def throttle(self, *reasons: str) -> None:
        """Throttle the sick GPU for these reasons."""
        draft = self.changes / "draft"
        draft.write_text(yaml.safe_dump({"throttle": [*reasons]}))
        draft.rename(self.changes / f"{SICK}.yml")

    def shown(self, name: str, *labels: str) -> list[str]:
        lines = (line for line in metrics(self.exporter.url) if line.startswith(f"{name}{{"))
        return [line for line in lines if all(label in line for label in labels)]

    def culprit_runs(self, gpu: int) -> float:
        (line,) = self.shown("rankscope_gpu_culprit_runs", f'gpu="{gpu}"')
        return float(line.rpartition(" ")[2])

    def run(self, name: str, rank: int, cause: str, until: Callable[[], object] = lambda: True, **slow: Any) -> None:
        """Start a job, wait until its rank is found to be late for that cause, and end it."""
        job = TrainingJob(self._directory / name, name, self._run_dir)
        job.start(loader_workers=0)
        try:
            job.wait_until_training()
            job.change(ranks={rank: slow})
            labels = f'run="{name}"', 'kind="straggler"', f'cause="{cause}"', f'rank="{rank}"'
            assert wait_for(lambda: self.shown("rankscope_finding_ratio", *labels), 60), metrics(self.exporter.url)
            assert wait_for(until, 30), self.shown("rankscope_gpu_culprit_runs")
            job.finish()
        finally:
            job.terminate()


def test_a_gpu_that_is_throttled_in_three_runs_alerts_and_a_slow_script_does_not(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, run_dir)
    with Stack(tmp_path, [node.exporter]) as stack:
        node.run("loading", INNOCENT, "data_wait", fetch=120)  # in the script's own process
        assert {node.culprit_runs(gpu) for gpu in range(RANKS)} == {0.0}
        node.throttle("sw_thermal_slowdown", "hw_thermal_slowdown")
        for number in (1, 2):
            node.run(f"hot-{number}", SICK, "throttled", lambda n=number: node.culprit_runs(SICK) == n, **SLOW)
        assert ALERT not in {one.name for one in stack.webhook.firing()}
        node.exporter.stop()
        node.exporter.start()
        node.run("hot-3", SICK, "throttled", lambda: node.culprit_runs(SICK) == 3.0, **SLOW)
        assert stack.notified(ALERT, within=30), stack.prometheus.query("ALERTS")
        alerts = [one for one in stack.webhook.firing() if one.name == ALERT]
        assert {one.labels["gpu"] for one in alerts} == {str(SICK)}
        assert [node.culprit_runs(gpu) for gpu in range(RANKS) if gpu != SICK] == [0.0] * (RANKS - 1)
    with pytest.raises(SystemExit):
        launch.main(["history", "--state-dir", str(node.state), "--json"])
    worst, *others = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert (worst["gpu"], worst["node"], worst["culprit_runs"]) == (str(SICK), "node-a", 3)
    assert {one["run"] for one in worst["incidents"] if one["evidence"]} == {"hot-1", "hot-2", "hot-3"}
    assert {one["culprit_runs"] for one in others} <= {0}
