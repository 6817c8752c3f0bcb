"""Four minutes of the gauntlet: one job, one stack, some faults and decoys; everything that is notified is right.

The figures are `make gauntlet`'s; here it matters that whatever is told is true, and that nothing else is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gauntlet.arena import Arena
from tests.gauntlet.case import LOUD
from tests.gauntlet.runner import Runner
from tests.gauntlet.schedule import draw

SEED = 0  # of no gauntlet

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-gauntlet-", dir="/dev/shm") as memory,
        Arena(tmp_path_factory.mktemp("gauntlet"), Path(memory)) as arena,
    ):
        yield Runner(arena)


def said_by_explain(line: dict[str, Any]) -> tuple[str, ...]:
    explained = line["explained"]
    return tuple(explained[name] for name in ("alert", "rank", "host", "cause"))


def said_by_the_notification(line: dict[str, Any]) -> tuple[str | None, ...]:
    labels = line["verdicts"][0]["labels"]
    if "run" not in labels:  # of a GPU that no rank of the run is on
        return (None,) * 4
    return labels["alertname"], labels["rank"], labels["node"], labels.get("cause", labels.get("reason"))


# Rank 0 that does extra work is in the demo (tests/e2e/test_demo.py).
@pytest.mark.parametrize("name", ["f07_memory_held", "f03_slow_loader", "f19_killed_rank"])
def test_a_fault_is_notified_with_its_place_and_cause_and_nothing_else_is(runner, name):
    line = runner.run(draw([name], SEED, LOUD))
    verdict = line["verdicts"][0]
    assert (verdict["fired"], verdict["place_right"], verdict["cause_right"]) == (True, True, True), line
    assert line["false_alarms"] == []
    assert line["resolved"]
    assert said_by_explain(line) == said_by_the_notification(line), line


@pytest.mark.parametrize("name", ["longer_sequences", "drift"])
def test_what_is_no_fault_is_not_notified(runner, name):
    assert runner.run(draw([name], SEED, LOUD))["false_alarms"] == []
