"""Simulated GPUs can be changed at run time."""

from __future__ import annotations

import pytest

from rankscope_exporter.simulation.changes import Changes
from rankscope_exporter.simulation.ranks import RankHistory
from rankscope_exporter.simulation.timeline import Seconds, State, Timeline


class Machine:
    """Two GPUs, the first 50% busy, and a clock."""

    def __init__(self, directory):
        self.directory, self.now = directory, 0.0
        self.timelines = [Timeline([(0.0, State(busy=0.5)), (60.0, State(busy=1.0))]), Timeline([(0.0, State())])]
        self.changes = Changes(directory, self.timelines, lambda: self.now)

    def write(self, gpu, text, at):
        self.now = at
        (self.directory / f"{gpu}.yml").write_text(text)
        self.changes.poll()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_file_replaces_the_scenario_from_when_it_is_seen(machine):
    machine.write(0, "{busy: 0.2, throttle: [sw_thermal_slowdown]}", at=10)
    first, second = machine.timelines
    assert (first.state(9.9).busy, first.state(10).busy, first.state(100).busy) == (0.5, 0.2, 0.2)
    assert first.seconds(20) == Seconds(computing=10 * 0.5 + 10 * 0.2)
    assert first.seconds_while(30, lambda state: bool(state.throttle)) == 20
    assert second.states == ((0.0, State()),)


def test_a_removed_file_leaves_an_idle_gpu(machine):
    machine.write(0, "{lost: true}", at=10)
    (machine.directory / "0.yml").unlink()
    machine.now = 20
    machine.changes.poll()
    assert machine.timelines[0].state(19.9).lost
    assert machine.timelines[0].state(20) == State()


def test_an_xid_occurs_once_per_write(machine):
    machine.write(1, "{xid: 79}", at=10)
    machine.changes.poll()
    machine.write(1, "{xid: 79, busy: 0}", at=20)
    assert machine.timelines[1].xids == ((10, 79), (20, 79))


@pytest.mark.parametrize("content", ["", "{busy: 2}", "{bussy: 1}", "busy: [", "{xid: often}", "[" * 100_000])
def test_an_invalid_file_is_logged_once_and_ignored(machine, caplog, content):
    machine.write(0, content, at=10)
    machine.changes.poll()
    assert machine.timelines[0].state(10).busy == 0.5
    assert len(caplog.records) == 1
    assert "ignored " in caplog.text


def test_a_slow_host_leaves_its_gpu_idle_for_a_share_of_the_ranks_time():
    history = RankHistory(lambda t: 0.4 if t > 1 else 1.0)
    history.add(1.0, Seconds(computing=1.0), (4711,))
    history.add(2.0, Seconds(computing=0.5, waiting=0.5), (4711,))
    assert history.seconds(2.0) == Seconds(computing=1.0 + 0.2, waiting=0.2)
