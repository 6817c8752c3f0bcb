"""Attack: as many and as large records as the limits allow, to make a page that is too large to scrape or parse."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.ranks.ranks_support import clock, ended, owned
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope.record import layout, reader
from rankscope.record.labels import MOST_LABELS, VALUE_LIMIT
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.share import ORDINARY_BYTES, OWNER_RANKS_LIMIT, RANKS_LIMIT

pytestmark = needs_root
LARGE: dict[str, Any] = {
    "phases": [f"{number:0>198}" for number in range(layout.MAX_PHASES - len(layout.PHASES))],
    "groups": [f"{number:0>100}" for number in range(layout.MAX_GROUPS)],
}
MORE: dict[str, dict[str, Any]] = {
    "labels": {"labels": {f"name_{number}{'x' * 33}": '"' * VALUE_LIMIT for number in range(MOST_LABELS // 2)}},
    "trackers": {
        "tracker_ids": dict.fromkeys(layout.TRACKERS, '"' * 200),
        "tracker_urls": dict.fromkeys(layout.TRACKERS, "https://" + "u" * 192),
    },
}
"""An info is too small for both."""


def forge(run_dir: Path, uid: int, count: int, **labels: Any) -> None:
    """Write records of `count` ranks, each with a value in every slot."""
    for number in range(count):
        path = ended(run_dir, uid, f"{uid}-{number}", rank=str(number), **labels)
        with path.open("r+b") as file:
            file.seek(layout.SLOTS_OFFSET + 8 * INDEX["steps"])
            slots = memoryview(bytearray(8 * (layout.SLOTS - INDEX["steps"]))).cast("d")
            for index in range(len(slots)):
                slots[index] = 1.0
            file.write(slots)


def page(directory: RunDirectory) -> tuple[int, Counter[int]]:
    """Return the page's bytes, and the number of ranks of each owner on it."""
    scan = directory.scan()
    written = sum(len(family.text) for family in Ranks().poll(scan))
    return written, Counter(rank.owner for rank in scan.ranks)


@pytest.mark.parametrize("more", MORE)
def test_a_page_of_the_largest_records_is_bounded_and_one_owner_gets_a_part_of_it(run_dir: Path, more: str) -> None:
    directory = RunDirectory([run_dir], clock)
    forge(run_dir, MALLORY, 256, run="r" * 200, **LARGE, **MORE[more])
    alone, shown = page(directory)
    assert alone <= OWNER_RANKS_LIMIT * ORDINARY_BYTES
    assert shown[MALLORY] > 0
    assert directory.scan().skipped["too_many_ranks"] == 256 - shown[MALLORY]


def test_a_few_ordinary_ranks_are_shown_next_to_those_of_users_who_fill_the_page(run_dir: Path) -> None:
    directory = RunDirectory([run_dir], clock)
    for uid in range(MALLORY, MALLORY + 4):
        forge(run_dir, uid, 200)
    for number in range(16):
        ended(run_dir, VICTIM, f"mine{number}", rank=str(number))
    written, shown = page(directory)
    assert len(owned(directory.scan(), VICTIM)) == 16
    assert written <= RANKS_LIMIT * ORDINARY_BYTES
    assert {shown[uid] for uid in range(MALLORY, MALLORY + 4)} == {(RANKS_LIMIT - 16) // 4}


def test_files_of_one_owner_are_read_up_to_a_limit(run_dir: Path) -> None:
    forge(run_dir, MALLORY, 300)
    assert RunDirectory([run_dir], clock).scan().skipped["too_many_files"] == 300 - 256


def test_the_infos_of_all_read_files_are_cached(run_dir: Path) -> None:
    for uid in range(MALLORY, MALLORY + 4):
        forge(run_dir, uid, 256, node=f"{uid}" * 20)
    directory = RunDirectory([run_dir], clock)
    directory.scan()
    parsed = reader._parsed.cache_info().misses
    directory.scan()
    assert reader._parsed.cache_info().misses == parsed


def test_nested_unknown_values_of_an_info_are_dropped(run_dir: Path) -> None:
    path = ended(run_dir, 0, "nested", more=[[] for _ in range(1000)], stacks={"signal": 40, "descriptor": 3})
    info = read_rank(path).info
    assert "more" not in info
    assert info["stacks"] == {"signal": 40, "descriptor": 3}
