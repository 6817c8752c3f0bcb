"""Conversion of a group's ranks to its name in the record, and back."""

from __future__ import annotations

import pytest

from rankscope.record.group_name import compact, members

NAMES = [
    ([0], "0"),
    ([0, 1], "0-1"),
    ([0, 1, 2, 3], "0-3"),
    ([0, 4, 8], "0-8:4"),
    ([0, 4], "0,4"),
    ([1, 2, 5], "1,2,5"),
]


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_groups_are_written_compactly_and_read_back(ranks, name) -> None:
    assert compact(ranks) == name
    assert list(members(name)) == ranks


@pytest.mark.parametrize("name", ["", "0,1,2…abc", "0-", "a", "0-999999999", "3-1"])
def test_an_invalid_name_has_no_members(name) -> None:
    assert not members(name)


def test_a_name_of_many_ranks_costs_a_reader_no_more_than_one_of_few() -> None:
    found = members("0-99999")
    assert isinstance(found, range)
    assert 99_999 in found
    assert not members("0-100000")
