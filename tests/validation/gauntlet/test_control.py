"""How ranks behave is written from a step on, so that all of them change in the same one."""

from __future__ import annotations

import pytest
from validation.gauntlet.control import Behaviour, Behaviours, Control, Progress


@pytest.fixture
def behaviours(tmp_path):
    behaviours = Behaviours(tmp_path / "control.json")
    behaviours.write(from_step=0)
    return behaviours


def test_a_rank_of_which_nothing_is_written_is_healthy(behaviours):
    assert Control(behaviours.path, 2).at(1) == Behaviour()


def test_a_behaviour_holds_from_its_step_on_for_whoever_it_is_for(behaviours):
    two, three = Control(behaviours.path, 2), Control(behaviours.path, 3)
    behaviours.everybody, behaviours.ranks = {"micro_steps": 4}, {2: {"post": 40}}
    behaviours.write(from_step=10)
    assert two.at(9) == Behaviour()
    assert two.at(10) == Behaviour(micro_steps=4, post=40)
    assert three.at(10) == Behaviour(micro_steps=4)


def test_who_hangs_knows_no_step_and_sees_at_once_that_it_may_go_on(behaviours):
    control = Control(behaviours.path, 2)
    behaviours.everybody = {"hangs": True}
    behaviours.write(from_step=5)
    assert control.at(5).hangs
    behaviours.everybody = {}
    behaviours.write(from_step=11)
    assert not control.latest().hangs
    assert control.at(6).hangs  # as all the others do, until step 11


def test_the_progress_is_the_last_step(tmp_path):
    progress = Progress(tmp_path / "progress")
    assert progress.read() == 0
    for step in (9, 10, 11):
        progress.write(step)
    assert progress.read() == 11
