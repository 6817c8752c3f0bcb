"""The GPUs of this node in `rankscope top`: with their past, if this user may read the exporter's state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter.ledger import parts
from rankscope_exporter.ledger.parts import DAY, Incident, Part
from rankscope_exporter.report.gpus import GpuReport
from rankscope_exporter.top import node
from rankscope_exporter.top.node import gpus_of

GPU = GpuReport("0", "GPU-a", "H100", True, "working", "", 1, None, None, None, None, False, 1.0, True, 0.97, {})


def culprit(run: str, now: float, days_ago: float) -> Incident:
    at = now - days_ago * DAY
    return Incident(run, "1000", "", 1, "straggler", "throttled", "3", "node-a", "0", at, at, evidence="throttled")


def shown(monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> Sequence[GpuReport]:
    monkeypatch.setattr(node, "STATE_DIR", state_dir)
    monkeypatch.setattr(node, "report_gpus", lambda *_: [GPU])
    sampler, reporter = SimpleNamespace(take_snapshot=lambda: None), SimpleNamespace(look=lambda: None)
    of_node: Any = SimpleNamespace(sampler=sampler, reporter=reporter, gpus=())
    return gpus_of(of_node)


@pytest.mark.parametrize(
    ("days_ago", "problem"), [(6.0, "was the culprit in 3 runs within a week"), (8.0, "")], ids=["young", "old"]
)
def test_a_gpu_that_was_the_culprit_in_three_runs_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, state_dir: Path, days_ago: float, problem: str
) -> None:
    now = time.time()
    incidents = tuple(culprit(name, now, days) for name, days in (("a", 1.0), ("b", 2.0), ("c", days_ago)))
    history = parts.text_of([Part("node-a", "0", "GPU-a", incidents=incidents)], now, 1 << 20)
    (state_dir / parts.FILE).write_bytes(history)
    assert [gpu.problem for gpu in shown(monkeypatch, state_dir)] == [problem]


def test_without_a_state_that_it_may_read_nothing_is_said_of_the_past(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [gpu.problem for gpu in shown(monkeypatch, tmp_path / "missing")] == [""]
