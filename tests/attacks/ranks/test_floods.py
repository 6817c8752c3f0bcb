"""Attack: thousands of names in the run directory, of one user or of as many as he has uids, to hide every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attacks.ranks.ranks_support import clock, ended, living, owned
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope.record import layout
from rankscope_exporter.ranks.run_directory import RunDirectory

pytestmark = needs_root
OWNERS = range(100_000, 101_100)  # as a user has them who was given a range of subordinate ids
SCANS = 10  # within which a new rank has to be seen


@pytest.fixture
def directory(run_dir: Path) -> Iterator[RunDirectory]:
    made = RunDirectory([run_dir], clock)
    yield made
    if hasattr(made, "close"):  # before it went on with a listing there was nothing to close
        made.close()


def flood(run_dir: Path, names: int, suffix: str = "rank") -> None:
    """Empty files: they cost their owner nothing."""
    for number in range(names):
        os.close(os.open(run_dir / f"{number}.{suffix}", os.O_CREAT | os.O_EXCL, 0o644))
        os.chown(run_dir / f"{number}.{suffix}", MALLORY, MALLORY)


def are_shown(directory: RunDirectory) -> bool:
    """Whether the victim's rank is there after some scans, and in each one from then on."""
    found = [bool(owned(directory.scan(), VICTIM)) for _ in range(SCANS)]
    return found[-1] and sorted(found) == found


@pytest.mark.parametrize("suffix", ["rank", "txt"])
def test_a_rank_that_is_shown_stays_whatever_comes_into_the_directory(
    run_dir: Path, directory: RunDirectory, suffix: str
) -> None:
    ended(run_dir, VICTIM, "mine")
    assert owned(directory.scan(), VICTIM)
    flood(run_dir, 9000, suffix)
    assert all(owned(directory.scan(), VICTIM) for _ in range(SCANS))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_gets_into_a_directory_of_nine_thousand_names(
    run_dir: Path, directory: RunDirectory, is_first: bool
) -> None:
    """Whichever end of a directory the file system lists first."""
    if is_first:
        ended(run_dir, VICTIM, "mine")
    flood(run_dir, 9000)
    if not is_first:
        ended(run_dir, VICTIM, "mine")
    assert are_shown(directory)
    assert directory.scan().skipped["too_many_files"] > 0


def test_a_scan_of_a_flood_looks_at_so_many_names_and_no_more(
    run_dir: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    stat = os.stat

    def counting(*arguments: object, **options: object) -> object:
        looked_at.append(arguments)
        return stat(*arguments, **options)  # type: ignore[arg-type, call-overload]

    flood(run_dir, 9000)
    monkeypatch.setattr(os, "stat", counting)
    directory.scan()
    assert len(looked_at) <= 4096 + 256


def test_files_of_a_thousand_uids_hide_no_rank_that_is_shown(run_dir: Path, directory: RunDirectory) -> None:
    ended(run_dir, VICTIM, "mine")
    assert owned(directory.scan(), VICTIM)
    of_many_owners(run_dir)
    assert all(owned(directory.scan(), VICTIM) for _ in range(SCANS))


def test_a_rank_gets_in_beside_files_of_a_thousand_uids_that_are_all_newer(
    run_dir: Path, directory: RunDirectory
) -> None:
    of_many_owners(run_dir)
    ended(run_dir, VICTIM, "mine")
    os.utime(run_dir / "mine.rank", (0, 0))
    assert are_shown(directory)


def of_many_owners(run_dir: Path) -> None:
    """As long as records, which takes no memory, and from the future."""
    for uid in OWNERS:
        path = run_dir / f"{uid}.rank"
        with path.open("wb") as file:
            file.truncate(layout.SIZE)
        os.chown(path, uid, uid)
        os.utime(path, (4e9, 4e9))


def test_hard_links_to_a_record_use_up_nothing_of_its_owner(run_dir: Path, directory: RunDirectory) -> None:
    path = ended(run_dir, VICTIM, "mine")
    for number in range(300):
        (run_dir / f"link{number}.rank").hardlink_to(path)
    with living(run_dir, VICTIM, "other", rank="1"):
        scan = directory.scan()
    assert len(scan.ranks) == 2
    assert scan.skipped == {}


def test_names_that_change_all_the_time_write_ten_lines_a_minute(
    run_dir: Path, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(5):
        for number in range(20):
            (run_dir / f"{turn}-{number}.rank").touch()
        directory.scan()
    assert len(caplog.records) == 10
