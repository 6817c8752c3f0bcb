"""The folders of captures: names, limits and readers."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope_exporter.capture import folder
from rankscope_exporter.capture.folder import (
    CAPTURES_LIMIT,
    RESERVED,
    Folder,
    FolderError,
    folder_name,
    kept,
    prune,
)
from rankscope_exporter.capture.settings import directory as flag_value

MIB = 2**20
DAY = 86_400.0
OTHER = os.geteuid() + 1


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_RDONLY)
    yield opened
    os.close(opened)


def capture(directory: int, run: str = "r", age: float = 0.0, owner: int = 1000, size: int = 10) -> str:
    figures = {"run": run, "owner": str(owner), "at": time.time() - age, "bytes": size, "sentence": "It hangs."}
    with Folder(directory, folder_name(run, figures["at"], "hang"), owner) as draft:
        draft.write("capture.json", json.dumps(figures))
        return draft.publish()


def names(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("train", "train"),
        ("../../etc/passwd", "etc_passwd"),
        ("a b\n\x1b[2Jc", "a_b_2Jc"),
        ("..", "run"),
        ("", "run"),
        ("-rf", "rf"),
        ("模型", "run"),
        ("x" * 500, "x" * 64),
    ],
)
def test_the_name_of_a_folder_has_no_character_that_a_run_chose_to_harm(run: str, name: str) -> None:
    assert folder_name(run, 0.0, "hang") == f"{name}-19700101T000000Z-hang"


def test_a_capture_appears_when_it_is_complete_and_leaves_nothing_if_it_fails(directory: int, tmp_path: Path) -> None:
    for fails, expected in ((True, set()), (False, {"r"}), (False, {"r", "r-2"})):
        with Folder(directory, "r", 1000) as draft:
            draft.write("report.html", "x")
            assert [*kept(directory)] == []
            assert len(names(tmp_path)) == len(expected) + fails
            if not fails:
                draft.publish()
        assert names(tmp_path) == expected
    assert (tmp_path / "r/report.html").read_text() == "x"


def test_without_access_control_lists_the_owner_may_not_read_it(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", fail)
    with Folder(directory, "r", OTHER) as draft:
        draft.write("report.html", "x")
        draft.publish()
        assert not draft.is_shared
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700


def test_a_file_is_cut_off_at_its_limit_and_a_capture_at_its_own(directory: int, tmp_path: Path) -> None:
    with Folder(directory, "r", 1000) as draft:
        sizes = [draft.write(f"{number}.txt", "é" * 3 * MIB) for number in range(6)]
        draft.publish()
    assert all(size <= folder.FILE_LIMIT + 100 for size in sizes)
    assert sum(sizes) <= folder.CAPTURE_LIMIT + 2 * folder.SMALLEST
    assert (tmp_path / "r/0.txt").read_text().endswith(f"(cut off after {folder.FILE_LIMIT} bytes)\n")


def test_files_of_another_process_are_counted_and_readable_and_leave_room_for_texts(
    directory: int, tmp_path: Path
) -> None:
    with Folder(directory, "r", OTHER) as draft:
        with draft.files("dumps") as dumps:
            os.close(os.open(dumps / "rank_0", os.O_CREAT | os.O_WRONLY, 0o600))
            os.truncate(dumps / "rank_0", folder.CAPTURE_LIMIT)
        with draft.files("none"):
            pass
        assert draft.write("report.html", "x" * 5000) == 5000
        assert draft.size == folder.CAPTURE_LIMIT + 5000
        draft.publish()
    assert names(tmp_path / "r") == {"dumps", "report.html"}
    assert (tmp_path / "r/dumps/rank_0").stat().st_mode & 0o777 == 0o640
    prune(directory, 100 * MIB, -1.0)
    assert names(tmp_path) == {"r"}  # without figures, it is no capture


def test_a_capture_with_a_folder_of_files_is_removed(directory: int, tmp_path: Path) -> None:
    name = capture(directory, age=2 * DAY)
    (tmp_path / name / "dumps").mkdir()
    (tmp_path / name / "dumps/rank_0").write_text("x")
    prune(directory, 100 * MIB, DAY)
    assert names(tmp_path) == set()


def test_a_link_with_the_name_of_a_file_is_not_followed(directory: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with Folder(directory, "r", 1000) as draft:
        (hidden,) = tmp_path.glob(".draft-*")
        (hidden / "report.html").symlink_to(target)
        with pytest.raises(FolderError):
            draft.write("report.html", "x")
    assert not target.exists()


def test_what_is_too_old_is_removed(directory: int, tmp_path: Path) -> None:
    old, young = capture(directory, age=15 * DAY), capture(directory, age=DAY)
    prune(directory, 100 * MIB, 14 * DAY)
    assert names(tmp_path) == {young} != {old}


def test_beyond_the_size_the_oldest_of_the_user_with_the_most_are_removed(directory: int, tmp_path: Path) -> None:
    victim = capture(directory, "victim", age=5 * DAY, owner=1, size=6 * MIB)
    flood = [capture(directory, f"flood{age}", age=age, owner=2, size=7 * MIB) for age in range(4)]
    prune(directory, 22 * MIB + RESERVED, 14 * DAY)
    assert names(tmp_path) == {victim, *flood[:2]}


def test_uids_of_one_user_count_together(directory: int, tmp_path: Path) -> None:
    victim = capture(directory, "victim", age=5 * DAY, owner=1, size=6 * MIB)
    for owner in range(100, 110):
        capture(directory, f"flood{owner}", owner=owner, size=5 * MIB)
    prune(directory, 22 * MIB + RESERVED, 14 * DAY, lambda owner: 7 if owner >= 100 else owner)
    assert victim in names(tmp_path)


def test_the_number_of_captures_is_limited(directory: int, tmp_path: Path) -> None:
    for number in range(CAPTURES_LIMIT + 3):
        capture(directory, f"r{number}", age=number)
    prune(directory, 1000 * MIB, 14 * DAY)
    assert len(names(tmp_path)) == CAPTURES_LIMIT - 1


def test_drafts_of_a_process_that_was_killed_are_removed_and_other_files_are_left(
    directory: int, tmp_path: Path
) -> None:
    for name, age in ((".draft-1", 3600.0), (".draft-2", 0.0), (".draft-3", -DAY), ("lost+found", 3600.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    prune(directory, 100 * MIB, 14 * DAY)
    assert names(tmp_path) == {".draft-2", "lost+found"}


def test_after_the_clock_was_set_back_a_new_capture_is_the_latest_and_is_kept(directory: int, tmp_path: Path) -> None:
    of_wrong_clock = [capture(directory, f"old{number}", age=-DAY, size=7 * MIB) for number in range(3)]
    new = capture(directory, "new", size=7 * MIB)
    assert next(kept(directory)).name == new
    prune(directory, 15 * MIB + RESERVED, 14 * DAY)
    assert new in names(tmp_path)
    assert len(names(tmp_path) & {*of_wrong_clock}) == 1


def test_a_dangling_link_does_not_end_the_removal(directory: int, tmp_path: Path) -> None:
    (tmp_path / ".draft-1").symlink_to(tmp_path / "missing")
    capture(directory, age=2 * DAY)
    prune(directory, 100 * MIB, DAY)
    assert names(tmp_path) == {".draft-1"}


def test_a_link_in_the_directory_is_neither_read_nor_removed(directory: int, tmp_path: Path) -> None:
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    opened = os.open(elsewhere, os.O_RDONLY)
    capture(opened, age=100 * DAY)
    os.close(opened)
    (tmp_path / "link").symlink_to(next(elsewhere.iterdir()))
    assert [*kept(directory)] == []
    prune(directory, 100 * MIB, DAY)
    assert len(names(elsewhere)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_other_users_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(Exception, match="writable by other users"):
        flag_value(str(tmp_path))
    tmp_path.chmod(0o711)
    assert flag_value(str(tmp_path)) == tmp_path


def test_a_directory_whose_place_another_user_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared/captures").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(Exception, match=f"{tmp_path}/shared is writable by other users"):
        flag_value(str(tmp_path / "shared/captures"))
    (tmp_path / "shared").chmod(0o1777)
    assert flag_value(str(tmp_path / "shared/captures")) == tmp_path / "shared/captures"


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir()
    (tmp_path / "link").symlink_to("captures")
    assert flag_value(str(tmp_path / "link")) == tmp_path / "captures"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Exception, match="loop"):
        flag_value(str(tmp_path / "loop"))


def test_a_directory_is_created_so_that_other_users_can_enter_and_not_list_it(tmp_path: Path) -> None:
    assert flag_value(str(tmp_path / "captures")).stat().st_mode & 0o777 == 0o711
    with pytest.raises(Exception, match="No such file"):
        flag_value(str(tmp_path / "missing/captures"))
