"""A behavior takes effect at the same step on all ranks."""

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


def test_a_behavior_takes_effect_at_its_step_on_its_ranks(writer):
    two, three = ControlReader(writer.path, 2), ControlReader(writer.path, 3)
    writer.common, writer.ranks = {"micro_steps": 4}, {2: {"post": 40}}
    writer.write(from_step=10)
    assert two.at(9) == Behavior()
    assert two.at(10) == Behavior(micro_steps=4, post=40)
    assert three.at(10) == Behavior(micro_steps=4)


def test_a_rank_that_hangs_sees_its_healing_at_once(writer):
    control = ControlReader(writer.path, 2)
    writer.common = {"hangs": True}
    writer.write(from_step=5)
    assert control.at(5).hangs
    writer.common = {}
    writer.write(from_step=11)
    assert not control.latest().hangs
    assert control.at(6).hangs  # as on all other ranks, until step 11


def test_the_progress_is_the_number_of_steps_begun(tmp_path):
    progress = Progress(tmp_path / "progress")
    assert progress.read() == 0
    for _ in range(3):
        progress.begin_step()
    assert progress.read() == 3
    assert [0 <= seconds < 1 for _, seconds in progress.read_steps()] == [True, True]
