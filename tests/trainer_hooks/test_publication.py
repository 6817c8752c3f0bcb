"""A process is a rank if it trains and is not the helper of a rank, even of one that has no record yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from testing.records import living_rank
from torch import distributed as dist

from rankscope import publication
from rankscope.process import identity
from rankscope.publication import Publication
from rankscope.record import layout
from rankscope.record.reader import read_rank
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

EVENTS = [layout.COLLECTIVE_WAIT, layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER]
UPDATES = (layout.BACKWARD, layout.OPTIMIZER)
RANK = {"RANK": "0", "WORLD_SIZE": "2", "RANKSCOPE_RUN": "job"}


@pytest.fixture(autouse=True)
def own_directory(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(run_dir))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def is_training(event: int) -> bool:
    writer = RankWriter()
    return Publication(writer, dict).is_training(Timeline(writer), event)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("parent", "inherits"),
    [({}, False), ({"pid": "1", "run": "r", "backend": "gloo"}, False), ({}, True)],
    ids=["no rank", "a recorded rank", "a rank without a record"],
)
def test_a_process_with_peers_that_a_rank_started_is_a_rank_once_it_trains(
    monkeypatch: pytest.MonkeyPatch, event: int, parent: dict[str, str], *, inherits: bool
) -> None:
    monkeypatch.setattr(publication, "parent_rank", lambda *_: parent)
    monkeypatch.setattr(identity, "inherits_rank", lambda: inherits)
    monkeypatch.setattr(identity, "has_peers", lambda: True)
    assert is_training(event) == (not (parent or inherits) or event in UPDATES)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_process_whose_group_has_no_other_one_is_a_rank_once_it_trains(event: int, *, has_gradients: bool) -> None:
    with torch.set_grad_enabled(has_gradients):
        assert is_training(event) == (event in UPDATES or (event == layout.FORWARD and has_gradients))


def test_a_parent_that_gets_its_record_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parents: list[dict[str, str]] = [{}, {"pid": "1", "run": "r", "world_size": "2"}]
    monkeypatch.setattr(publication, "parent_rank", lambda *_: parents.pop(0))
    writer = RankWriter()
    helper = Publication(writer, dict)
    assert helper.is_training(Timeline(writer), layout.FORWARD)
    assert not helper.is_training(Timeline(writer), layout.FORWARD)


def published(run_dir: Path) -> dict[str, Any]:
    """Publish this process and return its info."""
    writer = RankWriter()
    assert Publication(writer, lambda: {"uuid": ""}).publish()
    assert writer.path is not None
    assert writer.path.parent == run_dir
    return read_rank(writer.path).info


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, "1"), ({"RANK": "0", "WORLD_SIZE": "1"}, "1"), (RANK, "2"), (RANK | {"RANK": "1"}, "1")],
    ids=["no launcher", "torchrun of one", "a second container", "the next rank of a launcher"],
)
def test_trainings_of_one_process_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, variables: dict[str, str], rank: str
) -> None:
    for name, value in {**variables, "RANKSCOPE_RUN": "job"}.items():
        monkeypatch.setenv(name, value)
    with living_rank(run_dir, "job.0.5", run="job", world_size="1", group="0"):
        info = published(run_dir)
    assert [info[label] for label in ("run", "rank", "world_size", "group")] == ["job", rank, "1", rank]


def test_a_training_that_a_rank_started_has_a_number_beyond_the_ranks_of_its_run(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    parent = {"pid": "1", "run": "job", "rank": "0", "world_size": "2", "backend": "gloo"}
    monkeypatch.setattr(publication, "parent_rank", lambda *_: parent)
    assert (published(run_dir)["rank"], published(run_dir)["world_size"]) == ("2", "1")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_second_process_with_the_same_rank_is_warned_of_and_replaces_no_record(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, caplog: pytest.LogCaptureFixture, rank: str
) -> None:
    monkeypatch.setenv("RANKSCOPE_RUN", "job")
    for name, value in {"has_peers": True, "rank": rank, "group_name": "0-1"}.items():
        monkeypatch.setattr(identity, name, lambda value=value: value)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    name = identity.file_name(identity.describe())
    with living_rank(run_dir, name.replace("job.1", "job.0"), run="job", rank="0", node="pod-a", pid="7"):
        assert published(run_dir)["rank"] == rank
        assert len([*run_dir.glob("*.rank")]) == 2
    assert ("already rank 0 of run job: pid 7 on pod-a" in caplog.text) == (rank == "0")
