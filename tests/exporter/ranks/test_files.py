"""The files that are read: each owner's share, and only links of trusted owners."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from rankscope.record import directory
from rankscope.record.listing import Listing, RankFile
from rankscope_exporter.ranks import files
from rankscope_exporter.ranks.files import fair_share
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory


def file(name: str, owner: int, modified: float = 0.0) -> RankFile:
    return RankFile(Path("/run"), name, -1, owner, modified)


def test_an_owner_of_a_thousand_files_does_not_displace_an_owner_of_two() -> None:
    flood = [file(f"{number}.rank", 1, 1e18) for number in range(1000)]
    few = [file("a.rank", 2), file("b.rank", 2)]
    assert Counter(chosen.owner for chosen in fair_share([*flood, *few], 8)) == {1: 6, 2: 2}


def test_the_newest_files_of_an_owner_are_read() -> None:
    files = [file(f"{number}.rank", 1, modified=number) for number in range(5)]
    assert [chosen.path.stem for chosen in fair_share(files, 2)] == ["4", "3"]


def test_a_listing_ends_at_its_limit_and_reports_more_files(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.rank").touch()
    descriptor = directory.open_directory(tmp_path)
    complete = Listing(tmp_path, 5).look(descriptor)
    assert (len(complete.files), complete.are_more) == (5, False)
    listing = Listing(tmp_path, 3)
    some = listing.look(descriptor)
    assert (len(some.files), some.are_more) == (3, True)
    listing.close()
    os.close(descriptor)


def test_a_link_of_another_user_to_a_directory_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setattr(directory.os, "geteuid", lambda: 4711)
    if link.lstat().st_uid == 0:  # all users follow root's links: make it another user's
        os.chown(link, 4712, 4712, follow_symlinks=False)
    assert RunDirectory([link]).scan().skipped == {"symlink": 1}


def test_a_missing_directory_has_no_ranks(tmp_path: Path) -> None:
    assert RunDirectory([tmp_path / "missing"]).scan() == Scan((), {})


def test_the_owners_of_one_principal_have_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "principal", lambda uid: 1001 if uid >= 100_000 else uid)
    flood = [file(f"{uid}.rank", uid, 1e18) for uid in range(100_000, 101_000)]
    few = [file("a.rank", 2), file("b.rank", 2)]
    chosen = Counter(chosen.owner >= 100_000 for chosen in fair_share([*flood, *few], 8, owner_limit=5))
    assert chosen == {True: 5, False: 2}
