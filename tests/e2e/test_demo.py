"""The demo (`make demo ONCE=1`) as a test: real torchrun → exporter → Prometheus → Alertmanager → webhook."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.demo.story import Demo

# At the same time as one job of the gauntlet on each kind of device.
pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("shipped")]


def test_the_demo_notifies_of_both_faults_and_nothing_else(tmp_path: Path, run_dir: Path) -> None:
    with Demo(tmp_path, run_dir) as demo:
        demo.run()
        assert demo.verdict() == []
        assert len(demo.delays) == 2
