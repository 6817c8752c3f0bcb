"""Attack: thousands of files in the run directory, of one user or of all his subordinate uids, to hide every rank."""

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
OWNERS = range(100_000, 101_100)  # a user's range of subordinate uids
SCANS = 10  # a new rank has to be seen within these


@pytest.fixture
def directory(run_dir: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory([run_dir], clock)
    yield directory
    directory.close()


def flood(run_dir: Path, names: int, suffix: str = "rank") -> None:
    """Create empty files, which cost their owner nothing."""
    for number in range(names):
        os.close(os.open(run_dir / f"{number}.{suffix}", os.O_CREAT | os.O_EXCL, 0o644))
        os.chown(run_dir / f"{number}.{suffix}", MALLORY, MALLORY)


def are_shown(directory: RunDirectory) -> bool:
    """Return whether the victim's rank is shown after some scans, and in all later ones."""
    found = [bool(owned(directory.scan(), VICTIM)) for _ in range(SCANS)]
    return found[-1] and sorted(found) == found


@pytest.mark.parametrize("suffix", ["rank", "txt"])
def test_a_shown_rank_stays_when_the_directory_is_flooded(run_dir: Path, directory: RunDirectory, suffix: str) -> None:
    ended(run_dir, VICTIM, "mine")
    assert owned(directory.scan(), VICTIM)
    flood(run_dir, 9000, suffix)
    assert all(owned(directory.scan(), VICTIM) for _ in range(SCANS))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_new_rank_is_found_among_nine_thousand_files(run_dir: Path, directory: RunDirectory, is_first: bool) -> None:
    """Test both orders, since file systems list either the oldest or the newest file first."""
    if is_first:
        ended(run_dir, VICTIM, "mine")
    flood(run_dir, 9000)
    if not is_first:
        ended(run_dir, VICTIM, "mine")
    assert are_shown(directory)
    assert directory.scan().skipped["too_many_files"] > 0


def test_a_scan_of_a_flood_reads_a_limited_number_of_names(
    run_dir: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = []
    stat = os.stat

    def counting(*arguments: object, **options: object) -> object:
        stats.append(arguments)
        return stat(*arguments, **options)

    flood(run_dir, 9000)
    monkeypatch.setattr(os, "stat", counting)
    directory.scan()
    assert len(stats) <= 4096 + 256


def test_files_of_a_thousand_uids_do_not_hide_a_shown_rank(run_dir: Path, directory: RunDirectory) -> None:
    ended(run_dir, VICTIM, "mine")
    assert owned(directory.scan(), VICTIM)
    flood_with_many_owners(run_dir)
    assert all(owned(directory.scan(), VICTIM) for _ in range(SCANS))


def test_a_new_rank_is_found_among_newer_files_of_a_thousand_uids(run_dir: Path, directory: RunDirectory) -> None:
    flood_with_many_owners(run_dir)
    ended(run_dir, VICTIM, "mine")
    os.utime(run_dir / "mine.rank", (0, 0))
    assert are_shown(directory)


def flood_with_many_owners(run_dir: Path) -> None:
    """Create sparse files of a record's length with modification times in the future."""
    for uid in OWNERS:
        path = run_dir / f"{uid}.rank"
        with path.open("wb") as file:
            file.truncate(layout.SIZE)
        os.chown(path, uid, uid)
        os.utime(path, (4e9, 4e9))


def test_hard_links_to_a_record_do_not_use_up_its_owners_share(run_dir: Path, directory: RunDirectory) -> None:
    path = ended(run_dir, VICTIM, "mine")
    for number in range(300):
        (run_dir / f"link{number}.rank").hardlink_to(path)
    with living(run_dir, VICTIM, "other", rank="1"):
        scan = directory.scan()
    assert len(scan.ranks) == 2
    assert scan.skipped == {}


def test_changing_names_write_at_most_ten_log_lines_per_minute(
    run_dir: Path, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(5):
        for number in range(20):
            (run_dir / f"{turn}-{number}.rank").touch()
        directory.scan()
    assert len(caplog.records) == 10
