"""Attack: a record of another user's run, to raise an alert for it, hide its crash, or replace it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.samples import Sample
from testing.records import rank_info
from tests.attacks.ranks.ranks_support import NOW, clock, ended, living, owned
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.config import parse
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory
from rankscope_exporter.registry import HELP, rank_collectors

pytestmark = needs_root


@pytest.fixture
def directory(run_dir: Path) -> RunDirectory:
    return RunDirectory([run_dir], clock)


def samples(directory: RunDirectory) -> Iterator[Sample]:
    scan = directory.scan(with_steps=True)
    for collector in rank_collectors(parse(HELP, [], {}), lambda _at: {})[0]:
        for family in collector.poll(scan):
            yield from (sample for sample in family.samples if sample.name.startswith("rankscope_rank_"))


def test_every_series_of_a_rank_has_the_owner_of_its_record(run_dir: Path, directory: RunDirectory) -> None:
    ended(run_dir, MALLORY, "forged", run="victim", rank="999")
    with living(run_dir, VICTIM, "mine", run="victim", rank="0"):
        found = list(samples(directory))
    assert found
    assert {(sample.labels["rank"], sample.labels.get("owner")) for sample in found} == {
        ("999", str(MALLORY)),
        ("0", str(VICTIM)),
    }


def test_only_ranks_of_listed_users_are_shown(run_dir: Path) -> None:
    ended(run_dir, MALLORY, "forged", run="victim", rank="999")
    with living(run_dir, VICTIM, "mine", run="victim", rank="0"):
        ranks = RunDirectory([run_dir], clock, policy=RankPolicy(users=frozenset({VICTIM}))).scan().ranks
    assert [rank.owner for rank in ranks] == [VICTIM]


def test_a_living_forgery_does_not_hide_a_crash(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, VICTIM, "mine") as victim, living(run_dir, MALLORY, "forged", started=NOW - 1):
        directory.scan()
        victim.end()
        (mine,) = owned(directory.scan(), VICTIM)
    assert not mine.snapshot.alive


def test_a_forgery_that_starts_in_the_future_is_counted_and_not_shown(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, MALLORY, "forged", started=NOW + 3600):
        scan = directory.scan()
    assert scan.ranks == ()
    assert scan.skipped == {"future_start": 1}


def test_clocks_may_differ_by_some_seconds(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, VICTIM, "mine", started=NOW + 30):
        assert len(directory.scan().ranks) == 1


def test_a_rank_that_is_not_below_its_world_size_is_counted_and_not_shown(
    run_dir: Path, directory: RunDirectory
) -> None:
    ended(run_dir, MALLORY, "forged", run="victim", rank="999", world_size="4")
    ended(run_dir, VICTIM, "last", run="victim", rank="3", world_size="4")
    scan = directory.scan()
    assert [rank.key[:2] for rank in scan.ranks] == [("victim", "3")]
    assert scan.skipped == {"impossible_rank": 1}


@pytest.mark.parametrize("name", ["", " ", "    "])
def test_a_rank_of_a_run_without_a_name_is_counted_and_not_shown(
    run_dir: Path, directory: RunDirectory, name: str
) -> None:
    ended(run_dir, MALLORY, "forged", run=name)
    ended(run_dir, VICTIM, "mine", run=" mine")
    scan = directory.scan()
    assert [rank.key[0] for rank in scan.ranks] == [" mine"]
    assert scan.skipped == {"unnamed": 1}


def test_a_forgery_that_waits_does_not_take_over_when_the_rank_dies(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, VICTIM, "mine", node="here") as victim, living(run_dir, MALLORY, "forged", node="there"):
        assert directory.scan().skipped == {}, "not a duplicate: another user's run"
        victim.end()
        for _ in range(2):
            assert [rank.snapshot.info["node"] for rank in owned(directory.scan(), VICTIM)] == ["here"]


def test_a_restarted_run_replaces_its_ended_rank_at_once(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, VICTIM, "first") as first:
        directory.scan()
        first.end()
        assert not directory.scan().ranks[0].snapshot.alive
        with living(run_dir, VICTIM, "second", started=NOW - 1, node="again"):
            (rank,) = directory.scan().ranks
    assert (rank.snapshot.alive, rank.snapshot.info["node"]) == (True, "again")


def test_the_first_of_two_living_records_of_one_owner_stays(run_dir: Path, directory: RunDirectory) -> None:
    with living(run_dir, VICTIM, "first", node="first"):
        directory.scan()
        with living(run_dir, VICTIM, "second", started=NOW - 1, node="second"):
            scan = directory.scan()
    assert [rank.snapshot.info["node"] for rank in scan.ranks] == ["first"]
    assert scan.skipped == {"duplicate": 1}


def test_an_end_in_the_future_counts_from_when_it_is_noticed(run_dir: Path) -> None:
    now = [NOW]
    directory = RunDirectory([run_dir], lambda: now[0])
    ended(run_dir, MALLORY, "forged", at=NOW + 1e9)
    assert len(directory.scan().ranks) == 1
    now[0] += 601
    assert directory.scan().ranks == ()


def test_a_record_that_changes_its_rank_does_not_duplicate_series(run_dir: Path, directory: RunDirectory) -> None:
    processes = RankProcesses()
    with living(run_dir, MALLORY, "first", rank="7") as first:
        processes.poll(directory.scan())
        assert first.ask(json.dumps(rank_info(run="train", rank="8"))) == "written"
        with living(run_dir, MALLORY, "second", rank="7"):
            found = [sample for family in processes.poll(directory.scan()) for sample in family.samples]
    series = [(sample.name, *sorted(sample.labels.items())) for sample in found]
    assert {sample.labels["rank"] for sample in found} == {"7", "8"}
    assert len(series) == len(set(series))
