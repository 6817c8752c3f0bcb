"""The ranks on a page: of each owner a share, and those that are shown stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from testing.records import rank_snapshot

from rankscope_exporter.ranks import share
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.share import STAYING_LIMIT, fair_page


def ranks(owner: int, count: int, *, alive: bool = True) -> list[Rank]:
    snapshots = [rank_snapshot(alive=alive, rank=str(number), run="r") for number in range(count)]
    return [Rank(snapshot, None if alive else 1.0, owner) for snapshot in snapshots]


def test_shown_ranks_stay_when_more_owners_come_than_fit() -> None:
    mine, others = ranks(1, 8), [rank for owner in range(100, 600) for rank in ranks(owner, 1)]
    page = fair_page([*others, *mine], {rank.key for rank in mine}, limit=256)
    assert Counter(rank.owner == 1 for rank in page) == {True: 8, False: 248}


def test_an_owner_who_fills_the_page_leaves_room_for_newcomers() -> None:
    full = ranks(1, 256)
    page = fair_page([*full, *ranks(2, 100)], {rank.key for rank in full}, limit=256, owner_limit=256)
    assert Counter(rank.owner for rank in page) == {1: 156, 2: 100}
    assert STAYING_LIMIT < 156


def test_a_page_has_each_rank_once_and_ended_ones_do_not_stay() -> None:
    mine, over = ranks(1, 4), ranks(2, 4, alive=False)
    page = fair_page([*over, *mine, *ranks(3, 4)], {rank.key for rank in (*mine, *over)}, limit=8)
    assert len({rank.key for rank in page}) == len(page) == 8
    assert Counter(rank.owner for rank in page)[2] <= 2


def test_the_owners_of_one_principal_have_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "principal", lambda uid: 1001 if uid >= 100_000 else uid)
    many = [rank for owner in range(100_000, 100_300) for rank in ranks(owner, 1)]
    page = fair_page([*many, *ranks(1, 64)], {rank.key for rank in many}, limit=128)
    assert Counter(rank.owner == 1 for rank in page) == {True: 64, False: 64}


def test_a_heavy_rank_stays_only_within_the_limit_of_staying_ranks() -> None:
    heavy = [replace(rank, weight=STAYING_LIMIT + 1) for rank in ranks(1, 1)]
    others = [rank for owner in range(100, 200) for rank in ranks(owner, 1)]
    page = fair_page([*others, *heavy], {rank.key for rank in heavy}, limit=32)
    assert heavy[0].key not in {rank.key for rank in page}
