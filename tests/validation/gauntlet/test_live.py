"""Some minutes of the gauntlet: a job on each kind of device, some faults and decoys; each notification must be right.

`make gauntlet` measures the figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testing.job.device import ASYNCHRONOUS, GLOO
from validation.gauntlet.arena import LoneArena
from validation.gauntlet.case import LOUD
from validation.gauntlet.runner import Runner
from validation.gauntlet.schedule import draw

SEED = 0  # of no gauntlet
Run = Callable[[str], dict[str, Any]]

pytestmark = pytest.mark.alone


# Each device has a worker of its own in `make test`. The demo has the extra work of rank 0 over gloo (test_demo.py).
CASES = (
    (GLOO, "f07_memory_held"),
    (GLOO, "f03_slow_loader"),
    (GLOO, "drift"),
    (ASYNCHRONOUS, "f09_rank_zero_works"),
    (ASYNCHRONOUS, "f26_device_reads"),
    (ASYNCHRONOUS, "rare_reads"),
)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function that runs a case on the kind of device that the test names."""
    device = request.param
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-gauntlet-", dir="/dev/shm") as memory,
        LoneArena(tmp_path_factory.mktemp("gauntlet"), Path(memory), device) as arena,
    ):
        yield lambda name: Runner(arena).run(draw([name], SEED, LOUD, device))


def explained_labels(line: dict[str, Any]) -> dict[str, str]:
    return {name: line["explained"][name] for name in ("rank", "node", "cause") if line["explained"].get(name)}


def notified_labels(line: dict[str, Any]) -> dict[str, str]:
    """Return the labels that the finding has, too; none of an alert about a GPU without a rank of the run."""
    labels = line["verdicts"][0]["labels"]
    return {name: labels[name] for name in explained_labels(line) if name in labels} if "run" in labels else {}


@pytest.mark.parametrize(
    ("run", "name"),
    [pytest.param(device, name, marks=pytest.mark.xdist_group(device)) for device, name in CASES],
    indirect=["run"],
    scope="module",
)
def test_a_fault_is_notified_with_its_place_and_cause_and_nothing_else(run, name):
    line = run(name)
    assert line["false_alarms"] == []
    if line["kind"] == "decoy":
        return
    verdict = line["verdicts"][0]
    assert (verdict["fired"], verdict["place_right"], verdict["cause_right"]) == (True, True, True), line
    assert line["resolved"]
    assert explained_labels(line) == notified_labels(line), line
    assert line["runbook"]
    assert all(answer["right"] for answer in line["runbook"]), line["runbook"]
