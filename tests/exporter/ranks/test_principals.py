"""The users that ranges of subordinate uids count as."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope_exporter.ranks.principals import BLOCK, SubordinateIds, principal_of

UIDS = {"alice": 1001, "bob": 1002, "kubelet": 998, "root": 0}


@pytest.fixture
def subuid(tmp_path: Path) -> Path:
    return tmp_path / "subuid"


def ids(subuid: Path, text: str) -> SubordinateIds:
    subuid.write_text(text)
    return SubordinateIds(subuid, UIDS.get)


def known(found: SubordinateIds, *uids: int) -> list[int]:
    """Return the principals after the users of the ranges were looked up."""
    found.refresh()
    for uid in uids:
        found.principal(uid)
    found.refresh()
    return [found.principal(uid) for uid in uids]


def test_a_range_counts_as_its_user(subuid: Path) -> None:
    found = ids(subuid, "alice:100000:65536\nbob:165536:65536\n")
    uids = (1001, 99_999, 100_000, 165_535, 165_536, 231_071, 231_072)
    assert known(found, *uids) == [1001, 99_999, 1001, 1001, 1002, 1002, 231_072]


def test_all_ranges_of_a_user_count_as_the_user(subuid: Path) -> None:
    assert known(ids(subuid, "alice:300000:10\n1001:100000:10\n"), 300_005, 100_005) == [1001, 1001]


def test_a_range_within_another_does_not_hide_it(subuid: Path) -> None:
    found = ids(subuid, "alice:100000:1000000\nbob:200000:10\n")
    assert known(found, 200_005, 300_000) == [1002, 1001]


@pytest.mark.parametrize("name", ["kubelet", "root", "containers"])
def test_a_range_of_no_person_counts_in_blocks_since_it_holds_several_pods(subuid: Path, name: str) -> None:
    found = ids(subuid, f"{name}:70000:{10 * BLOCK}")
    assert known(found, 70_000, 70_000 + BLOCK - 1, 70_000 + BLOCK) == [70_000, 70_000, 70_000 + BLOCK]


def test_a_range_is_one_principal_before_its_user_is_looked_up(subuid: Path) -> None:
    found = ids(subuid, "alice:100000:65536")
    assert found.principal(100_005) == 100_005
    found.refresh()
    assert {found.principal(uid) for uid in range(100_000, 165_536, 1000)} == {100_000}


def test_only_a_refresh_looks_up_users_and_each_of_them_once(subuid: Path) -> None:
    asked: list[str] = []
    subuid.write_text("alice:100000:10\nnobody-yet:200000:10\nbob:300000:10\n")
    found = SubordinateIds(subuid, lambda name: asked.append(name) or UIDS.get(name))
    found.refresh()
    found.principal(100_000)
    found.principal(200_000)
    assert asked == []
    for _ in range(3):
        found.refresh()
        found.principal(100_000)
        found.principal(200_000)
    assert sorted(asked) == ["alice", "nobody-yet"]


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(
    subuid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ids(subuid, "alice:100000:10")
    assert known(found, 100_000) == [1001]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_arguments, **_options: pytest.fail("it has not changed"))
        assert known(found, 100_000) == [1001]
    subuid.write_text("1002:100000:10")
    os.utime(subuid, (1, 1))
    assert known(found, 100_000) == [1002]
    subuid.unlink()
    assert known(found, 100_000) == [100_000]


def test_lines_of_another_form_are_skipped(subuid: Path) -> None:
    lines = ["# alice:1:2", "", ":1:2", "alice", "alice:x:1", "alice:1:2:3", "alice:-5:10", "a:1:99999999999", "\udcff"]
    subuid.write_bytes("\n".join([*lines, "alice:100000:10"]).encode(errors="surrogateescape"))
    assert known(SubordinateIds(subuid, UIDS.get), 1, 100_000) == [1, 1001]


def test_a_uid_of_no_range_is_itself_and_an_owner_may_be_empty() -> None:
    assert SubordinateIds(Path("/does-not-exist")).principal(1234) == 1234
    assert [principal_of(""), principal_of("4294967294")] == ["", "4294967294"]
