"""A run on two nodes whose analyzer and exporters are killed and stopped while a finding is open."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing.live_nodes import LiveNodes
from testing.simulated_job import lagging
from testing.stack import wait_for

FOUND_WITHIN, SAVED, STOP = 120.0, 15.0, 12.0
TOLERANCE = 3.0
"""Seconds by which the begin of a finding may change when it is restored."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LiveNodes]:
    """Yield two nodes with a slow rank that is found."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, LiveNodes(tmp_path, Path(memory)) as nodes:
        (watch,) = nodes.watches
        assert wait_for(lambda: watch.looks and any(watch.looks[-1].lost.values()), FOUND_WITHIN)
        nodes.training.plan = lagging("forward", laggard=3)
        assert watch.found("straggler", FOUND_WITHIN)
        yield nodes


def test_a_finding_goes_on_over_the_ends_of_exporter_and_analyzer_and_a_stop(nodes: LiveNodes) -> None:
    (analyzer,), (watch,) = nodes.analyzers, nodes.watches
    before = watch.looks[-1].since
    time.sleep(SAVED)
    nodes.exporters[1].kill()
    nodes.exporters[1].start()
    analyzer.signal(signal.SIGSTOP)
    time.sleep(STOP)
    analyzer.signal(signal.SIGCONT)
    time.sleep(STOP)
    assert all(look.since.keys() == before.keys() for look in watch.looks if look.since)
    analyzer.kill()
    killed = time.time()
    analyzer.start()
    assert watch.found("straggler", FOUND_WITHIN, killed)
    assert watch.looks[-1].since == pytest.approx(before, abs=TOLERANCE)
