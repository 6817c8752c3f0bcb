"""The same as test_live.py on the asynchronous device, whose clock judges: the host waits for no other rank there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gauntlet.arena import Arena
from tests.gauntlet.case import LOUD
from tests.gauntlet.devices import ASYNCHRONOUS
from tests.gauntlet.runner import Runner
from tests.gauntlet.schedule import draw

SEED = 0  # of no gauntlet

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-gauntlet-", dir="/dev/shm") as memory,
        Arena(tmp_path_factory.mktemp("gauntlet"), Path(memory), ASYNCHRONOUS) as arena,
    ):
        yield Runner(arena)


@pytest.mark.parametrize("name", ["f09_rank_zero_works", "f26_device_reads"])
def test_a_fault_is_notified_with_its_place_and_cause_and_nothing_else_is(runner, name):
    line = runner.run(draw([name], SEED, LOUD, ASYNCHRONOUS))
    verdict = line["verdicts"][0]
    assert (verdict["fired"], verdict["place_right"], verdict["cause_right"]) == (True, True, True), line
    assert line["false_alarms"] == []


def test_a_value_that_is_seldom_read_is_no_fault(runner):
    assert runner.run(draw(["seldom_reads"], SEED, LOUD, ASYNCHRONOUS))["false_alarms"] == []
