"""The limit of new names of an owner's ranks per hour: it covers all labels and does not affect normal use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing.clock import Clock
from testing.records import publish, rank_snapshot

from rankscope.record import layout
from rankscope_exporter.ranks import new_series
from rankscope_exporter.ranks.new_series import BURST, SERIES_OF_RANK, SERIES_PER_HOUR, NewSeries
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.run_directory import RunDirectory

HOUR = 3600
RANKS_PER_HOUR = (BURST + SERIES_PER_HOUR) // SERIES_OF_RANK  # at most, in the first hour


def rank(owner: int = 1, **labels: Any) -> Rank:
    return Rank(rank_snapshot(**labels), None, owner)


class Node:
    """A node on which ranks appear, with the limit of new series."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.series = NewSeries(self.clock)

    def show(self, *ranks: Rank, seconds: float = 1.0) -> int:
        """Return the number of ranks that a scan admits, and advance the clock."""
        admitted = sum(self.series.admits(rank) for rank in ranks)
        self.series.forget()
        self.clock.advance(seconds)
        return admitted


@pytest.fixture
def node() -> Node:
    return Node()


def phases(number: int) -> list[str]:
    return [f"phase-{number}-{n}" for n in range(layout.MAX_PHASES - len(layout.PHASES))]


NEW: dict[str, Callable[[int], dict[str, Any]]] = {
    "runs": lambda number: {"run": f"run-{number}"},
    "ranks": lambda number: {"rank": str(number)},
    "groups": lambda number: {"groups": [f"{number}-{n}" for n in range(layout.MAX_GROUPS)]},
    "phases": lambda number: {"phases": phases(number)},
    "all": lambda number: {"run": f"{number}", "node": f"{number}", "phases": phases(number)},
}
LEAST = {"runs": SERIES_OF_RANK, "ranks": SERIES_OF_RANK, "groups": 16 * 3, "phases": 5 * len(phases(0))}


@pytest.mark.parametrize("kind", NEW)
def test_new_names_are_admitted_up_to_a_limit(node: Node, kind: str) -> None:
    admitted = sum(node.show(rank(**NEW[kind](number)), seconds=0.25) for number in range(4 * HOUR))
    assert 100 < admitted <= (BURST + SERIES_PER_HOUR) / LEAST.get(kind, SERIES_OF_RANK)


OF_INFO = {
    "settings": lambda n: {"batch_size": n},
    "slurm": lambda n: {"job_name": n},
    "group_descriptions": lambda n: [n],
    "labels": lambda n: {"team": n},
    "tracker_ids": lambda n: {"wandb": n},
}


@pytest.mark.parametrize("label", ["node", "pid", "uuid", "world_size", "group", *OF_INFO])
def test_a_label_that_changes_is_a_new_name(node: Node, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_series, "BURST", SERIES_OF_RANK + 12)
    monkeypatch.setattr(new_series, "SERIES_PER_HOUR", 0)
    values = (OF_INFO.get(label, str)(str(n)) for n in range(100))
    assert sum(node.show(rank(**{label: value})) for value in values) < 13


def test_an_owner_with_too_many_names_does_not_affect_other_owners(node: Node) -> None:
    for number in range(HOUR):
        node.show(*(rank(1, run=f"{number}-{n}") for n in range(10)))
        assert node.show(rank(2, run=f"sweep-{number // 10}"), seconds=0) == 1


def test_a_rank_with_unchanged_names_stays_when_its_owner_adds_others(node: Node) -> None:
    for number in range(3 * HOUR):
        mine = rank(run="mine", groups=["0-3"], phases=["render"])
        assert node.show(mine, seconds=0) == 1
        node.show(rank(run=f"{number}"))


def test_the_limit_refills_within_an_hour(node: Node) -> None:
    first, second, third = (sum(node.show(rank(run=f"{hour}-{number}")) for number in range(HOUR)) for hour in range(3))
    assert first <= RANKS_PER_HOUR
    assert second == pytest.approx(SERIES_PER_HOUR / SERIES_OF_RANK, rel=0.05)
    assert third == pytest.approx(second, rel=0.01)


@pytest.mark.parametrize(("runs", "ranks"), [(900, 1), (300, 4), (100, 8)])
def test_a_sweep_of_short_runs_is_always_shown(node: Node, runs: int, ranks: int) -> None:
    for number in range(3 * runs):
        for _ in range(3):  # its group and settings are known a moment later
            labels = {"run": f"sweep-{number}", "groups": [f"0-{ranks - 1}"], "settings": {"precision": f"{_}"}}
            members = [rank(rank=str(n), pid=f"{number}{n}", **labels) for n in range(ranks)]
            assert node.show(*members, seconds=0) == ranks
        node.clock.advance(HOUR / runs)


def test_a_job_that_restarts_repeatedly_is_always_shown(node: Node) -> None:
    for restart in range(2 * HOUR // 10):
        members = [rank(rank=str(n), pid=f"{restart}{n}", groups=["0-7"]) for n in range(8)]
        assert node.show(*members, seconds=10) == 8


def test_an_elastic_job_is_shown_at_any_size(node: Node) -> None:
    for change in range(2 * HOUR // 30):
        size = 4 + change % 5
        members = [
            rank(rank=str(n), pid=f"{change}{n}", world_size=str(size), groups=[f"0-{size}"]) for n in range(size)
        ]
        assert node.show(*members, seconds=30) == size


def test_a_restarted_exporter_shows_all_ranks_of_an_owner_that_fit_on_a_page(node: Node) -> None:
    assert node.show(*(rank(run=str(n), groups=["0"], phases=["render"]) for n in range(128))) == 128


def test_remembered_names_and_owners_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_series, "NAMES_REMEMBERED", 200)
    monkeypatch.setattr(new_series, "OWNERS_REMEMBERED", 50)
    for number in range(1000):
        node.show(rank(number, run=f"{number}"), rank(run="mine"))
        assert len(node.series._shown) <= 200
        assert len(node.series._left) <= 50
    node.clock.advance(HOUR)
    node.show()
    assert not node.series._shown


def test_ranks_with_too_many_names_are_counted_but_not_logged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(new_series, "BURST", 3 * SERIES_OF_RANK)
    directory = RunDirectory([run_dir], Clock(0.0), monotonic=Clock(0.0))
    for number in range(5):
        publish(run_dir, f"r.{number}", run=f"run-{number}")
    scan = directory.scan()
    assert len(scan.ranks) == 2
    assert scan.skipped == {"too_many_names": 3}
    assert [rank.key for rank in directory.scan().ranks] == [rank.key for rank in scan.ranks]
    assert not caplog.records


def test_the_owners_of_one_principal_add_series_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_series, "principal", lambda uid: 1001 if uid >= 100_000 else uid)
    many = [rank(100_000 + number, run=f"run-{number}") for number in range(2 * RANKS_PER_HOUR)]
    assert node.show(*many) <= BURST // SERIES_OF_RANK
    assert node.show(rank(1, run="other")) == 1
