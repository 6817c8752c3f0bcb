"""A behavior takes effect at a step, so that all ranks change in the same one."""

from __future__ import annotations

import pytest
from testing.job.control import Behavior, ControlReader, ControlWriter, Progress


@pytest.fixture
def writer(tmp_path):
    writer = ControlWriter(tmp_path / "control.json")
    writer.write(from_step=0)
    return writer


def test_a_rank_without_an_entry_is_healthy(writer):
    assert ControlReader(writer.path, 2).at(1) == Behavior()


def test_a_behavior_takes_effect_at_its_step_on_the_ranks_that_it_is_for(writer):
    two, three = ControlReader(writer.path, 2), ControlReader(writer.path, 3)
    writer.everybody, writer.ranks = {"micro_steps": 4}, {2: {"post": 40}}
    writer.write(from_step=10)
    assert two.at(9) == Behavior()
    assert two.at(10) == Behavior(micro_steps=4, post=40)
    assert three.at(10) == Behavior(micro_steps=4)


def test_a_rank_that_hangs_sees_at_once_that_it_may_go_on(writer):
    control = ControlReader(writer.path, 2)
    writer.everybody = {"hangs": True}
    writer.write(from_step=5)
    assert control.at(5).hangs
    writer.everybody = {}
    writer.write(from_step=11)
    assert not control.latest().hangs
    assert control.at(6).hangs  # as all other ranks do, until step 11


def test_the_progress_is_the_number_of_steps_begun(tmp_path):
    progress = Progress(tmp_path / "progress")
    assert progress.read() == 0
    for _ in range(3):
        progress.begin_step()
    assert progress.read() == 3
    assert [0 <= seconds < 1 for _, seconds in progress.read_steps()] == [True, True]
