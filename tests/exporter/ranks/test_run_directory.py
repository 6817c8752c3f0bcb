"""The ranks of a machine: their current records, ended ranks for ten minutes, and bad files counted by reason."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testing.clock import Clock
from testing.records import living_rank, publish, rank_info

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.listing import Listed, Listing
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.run_directory import SERIES_LIMIT, RankPolicy, RunDirectory

NOW = 1_700_000_000.0
INVALID_LABELS: list[dict[str, Any]] = [
    *({"run": "a\nb"}, {"run": "x" * 201}, {"run": "\ud800"}, {"rank": "zero"}, {"rank": "٣"}, {"pid": "9" * 11}),
    *({"node": "\x00"}, {"group": 3}, {"probes_disabled": 3}, {"phases": [""]}),
]


def leave_record(directory: Path, name: str, ended_unix: float = 0.0, **labels: Any) -> Path:
    """Write a record whose writer looks gone to a reader in this process."""
    slots = {"started_unix": NOW - 100}
    if ended_unix:
        slots |= {"ended": layout.FINISHED, "ended_unix": ended_unix}
    return publish(directory, name, slots, **labels)[1]


@pytest.fixture
def living(run_dir: Path) -> Iterator[Callable[..., None]]:
    """Return a function that starts a rank."""
    with ExitStack() as ranks:
        yield lambda name, **labels: ranks.enter_context(living_rank(run_dir, name, **labels))


def test_the_seconds_in_a_phase_do_not_decrease_when_a_rank_is_killed_in_it(run_dir: Path) -> None:
    directory, started = RunDirectory([run_dir]), time.monotonic() - 1000.0
    with living_rank(run_dir, slots={"started_unix": time.time() - 1000.0, "started_monotonic": started}) as process:
        (living,) = directory.scan().ranks
        process.kill()
    (killed,) = directory.scan().ranks
    assert living.snapshot.alive
    assert not killed.snapshot.alive
    assert killed.snapshot.phase_seconds == living.snapshot.phase_seconds
    assert sum(killed.snapshot.phase_seconds.values()) > 999.0


def test_the_living_one_of_two_records_of_a_rank_is_shown(run_dir: Path, living: Callable[..., None]) -> None:
    leave_record(run_dir, "r.0.9", ended_unix=NOW, pid="9")
    living("r.0.5", pid="5")
    (rank,) = RunDirectory([run_dir], Clock(NOW)).scan().ranks
    assert rank.snapshot.info["pid"] == "5"


@pytest.mark.parametrize(("size", "group", "skipped"), [("1", "2", 0), ("1", "0-2", 1), ("2", "2", 1)])
def test_only_a_rank_that_trains_alone_may_have_a_number_beyond_its_world_size(
    run_dir: Path, size: str, group: str, skipped: int
) -> None:
    leave_record(run_dir, "r.2", ended_unix=NOW, rank="2", world_size=size, group=group)
    scan = RunDirectory([run_dir], Clock(NOW)).scan()
    assert scan.skipped == ({"impossible_rank": 1} if skipped else {})
    assert [rank.run for rank in scan.ranks] == ([] if skipped else [("r", str(os.getuid()), "2")])


def test_ranks_of_several_directories_are_found(run_dir: Path) -> None:
    for name in ("a", "b"):
        (run_dir / name).mkdir()
        leave_record(run_dir / name, "r", ended_unix=NOW, run=name)
    ranks = RunDirectory([run_dir / "a", run_dir / "b"], Clock(NOW)).scan().ranks
    assert sorted(rank.key for rank in ranks) == [("a", "0", str(os.getuid())), ("b", "0", str(os.getuid()))]


def test_bad_files_are_counted_by_reason_and_do_not_affect_others(run_dir: Path) -> None:
    good = leave_record(run_dir, "good", ended_unix=NOW)
    (run_dir / "short.rank").write_bytes(good.read_bytes()[:100])
    (run_dir / "notes.rank").write_text("not a record, " * 2000)
    (run_dir / "link.rank").symlink_to(good)
    (run_dir / "other-file.txt").write_text("none of ours")
    scan = RunDirectory([run_dir], Clock(NOW)).scan()
    assert [rank.snapshot.path for rank in scan.ranks] == [good]
    assert scan.skipped == {"truncated": 1, "foreign": 1, "symlink": 1}


def test_a_bad_file_is_logged_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / "short.rank").write_bytes(b"")
    directory = RunDirectory([run_dir])
    for _ in range(3):
        directory.scan()
    assert len(caplog.records) == 1


def test_errors_of_files_do_not_refer_to_frames(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / "short.rank").write_bytes(b"x")
    write_record(run_dir / "no_json.rank", b"{")
    RunDirectory([run_dir]).scan()
    errors = [record.args[1] for record in caplog.records]
    assert len(errors) == 2
    for error in errors:
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_a_file_without_read_permission_is_skipped(run_dir: Path) -> None:
    path = leave_record(run_dir, "r", ended_unix=NOW)
    path.chmod(0)
    if os.geteuid() == 0:  # root can read all files: use something that even root cannot open
        path.unlink()
        path.mkdir()
        assert RunDirectory([run_dir]).scan().skipped == {"foreign": 1}
    else:
        assert RunDirectory([run_dir]).scan().skipped == {"unreadable": 1}


def write_record(path: Path, text: bytes, **slots: float) -> None:
    """Write a record whose info is exactly `text`."""
    slots = {"started_unix": NOW, "ended": layout.FINISHED, "ended_unix": NOW, **slots}
    writer, _ = publish(path.parent, path.stem, slots)
    writer.slots[INDEX["info_place"]] = len(text)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(layout.INFO_OFFSET)
        file.write(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 8000,
        b'{"run":' * 1000,
        b"1" * 8000,
        b"\xff\xfe{",
        *(json.dumps(rank_info(**labels)).encode() for labels in INVALID_LABELS),
    ],
)
def test_an_info_that_no_hook_writes_is_refused(run_dir: Path, text: bytes) -> None:
    write_record(run_dir / "odd.rank", text)
    scan = RunDirectory([run_dir], Clock(NOW)).scan()
    assert scan.ranks == ()
    assert scan.skipped == {"foreign": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("step_seconds", value) for value in (-1.0, 1e300, float("inf"), float("nan"))), ("step_buckets", 0.5)],
)
def test_an_impossible_value_is_refused(run_dir: Path, field: str, value: float) -> None:
    write_record(run_dir / "odd.rank", json.dumps(rank_info()).encode(), **{field: value})
    assert RunDirectory([run_dir], Clock(NOW)).scan().skipped == {"foreign": 1}


def test_a_hard_link_shows_its_rank_once(run_dir: Path) -> None:
    path = leave_record(run_dir, "r", ended_unix=NOW)
    (run_dir / "again.rank").hardlink_to(path)
    scan = RunDirectory([run_dir], Clock(NOW)).scan()
    assert len(scan.ranks) == 1
    assert not scan.skipped


def test_pipes_and_directories_named_like_records_do_not_block(run_dir: Path) -> None:
    os.mkfifo(run_dir / "pipe.rank")
    (run_dir / "directory.rank").mkdir()
    assert RunDirectory([run_dir], Clock(NOW)).scan().skipped == {"foreign": 2}


def test_more_files_than_the_limit_are_left_unread_and_counted(run_dir: Path) -> None:
    for number in range(10):
        leave_record(run_dir, f"r.{number}", ended_unix=NOW, rank=str(number))
    scan = RunDirectory([run_dir], Clock(NOW), files_limit=8).scan()
    assert len(scan.ranks) == 8
    assert scan.skipped == {"too_many_files": 2}


def test_more_ranks_than_the_limit_are_not_shown_and_counted(run_dir: Path, living: Callable[..., None]) -> None:
    living("old", rank="7")
    for number in range(4):
        leave_record(run_dir, f"r.{number}", ended_unix=NOW, rank=str(number))
    scan = RunDirectory([run_dir], Clock(NOW), ranks_limit=2).scan()
    assert scan.skipped == {"too_many_ranks": 3}
    assert scan.ranks[0].snapshot.info["rank"] == "7"  # living ranks come first


def test_the_steps_of_a_shown_rank_are_read_and_those_of_other_files_only_up_to_the_limit(run_dir: Path) -> None:
    for number in range(4):
        leave_record(run_dir, f"r.{number}", ended_unix=NOW, rank=str(number))
    with living_rank(run_dir, "late", rank="7"):
        os.utime(run_dir / "late.rank", (0, 0))  # the oldest file is read last, unless it is shown
        directory = RunDirectory([run_dir], Clock(NOW), ranks_limit=1)
        (first,), (second,) = (directory.scan(with_steps=True).ranks for _ in range(2))
    assert (first.snapshot.info["rank"], second.snapshot.info["rank"]) == ("7", "7")
    assert (first.snapshot.rings.steps, len(second.snapshot.rings.steps)) == (b"", 8 * layout.RING_SLOTS)


def test_bad_names_are_logged_a_few_at_a_time(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(30):
        (run_dir / f"{number}.rank").write_bytes(b"")
    RunDirectory([run_dir]).scan()
    assert len(caplog.records) == 10


def test_an_own_link_to_a_run_directory_is_followed(run_dir: Path) -> None:
    (run_dir / "real").mkdir()
    leave_record(run_dir / "real", "r", ended_unix=NOW)
    (run_dir / "link").symlink_to("real")
    assert len(RunDirectory([run_dir / "link"], Clock(NOW)).scan().ranks) == 1


def test_a_run_directory_that_is_not_a_directory_is_counted_and_logged(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "file").write_text("")
    assert RunDirectory([run_dir / "file"]).scan().skipped == {"unreadable": 1}
    assert "Not a directory" in caplog.text


def test_the_largest_rank_has_as_many_series_as_the_limit_assumes(run_dir: Path) -> None:
    phases = [f"phase-{number}" for number in range(layout.MAX_PHASES - len(layout.PHASES))]
    groups = [f"{number}-{number + 1}" for number in range(layout.MAX_GROUPS)]
    more = {"settings": {"precision": "bf16"}, "tracker_ids": dict.fromkeys(layout.TRACKERS, "1")}
    leave_record(run_dir, "r", ended_unix=NOW, phases=phases, groups=groups, **more)
    path = run_dir / "r.rank"
    path.chmod(0o644)
    with path.open("r+b") as file:
        for index in range(INDEX["steps"], layout.SLOTS):
            file.seek(layout.SLOTS_OFFSET + 8 * index)
            file.write(struct.pack("d", 1.0))
    families = Ranks().poll(RunDirectory([run_dir], Clock(NOW)).scan())
    assert sum(len(family.samples) for family in families if family.name.startswith("rankscope_rank_")) == SERIES_LIMIT


@pytest.fixture
def owned_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each file belong to the uid that its name starts with, which otherwise only root could do."""

    look = Listing.look

    def with_owners(*arguments: Any) -> Listed:
        listed = look(*arguments)
        return replace(listed, files=[file._replace(owner=int(file.name[0])) for file in listed.files])

    monkeypatch.setattr(Listing, "look", with_owners)


@pytest.mark.parametrize("has_owner", [True, False])
@pytest.mark.usefixtures("owned_by_name")
def test_another_users_living_rank_is_not_replaced(run_dir: Path, living: Callable[..., None], has_owner: bool) -> None:
    living("1.rank", node="mine")
    directory = RunDirectory([run_dir], Clock(NOW), policy=RankPolicy(has_owner=has_owner))
    directory.scan()
    living("2.rank", node="theirs")  # started later
    scan = directory.scan()
    shown = [rank.snapshot.info["node"] for rank in scan.ranks]
    assert (sorted(shown), scan.skipped) == (["mine", "theirs"], {}) if has_owner else (["mine"], {"duplicate": 1})


@pytest.mark.usefixtures("owned_by_name")
def test_without_owners_another_user_can_replace_an_ended_rank(run_dir: Path, living: Callable[..., None]) -> None:
    leave_record(run_dir, "1.rank", ended_unix=NOW, node="mine")
    directory = RunDirectory([run_dir], Clock(NOW), policy=RankPolicy(has_owner=False))
    directory.scan()
    living("2.rank", node="theirs")
    assert [rank.snapshot.info["node"] for rank in directory.scan().ranks] == ["theirs"]


@pytest.mark.usefixtures("owned_by_name")
def test_without_owners_ranks_with_different_uids_are_one_run(run_dir: Path) -> None:
    for number in (1, 2):
        leave_record(run_dir, f"{number}.rank", ended_unix=NOW, rank=str(number))
    apart = RunDirectory([run_dir], Clock(NOW)).scan().ranks
    together = RunDirectory([run_dir], Clock(NOW), policy=RankPolicy(has_owner=False)).scan().ranks
    assert sorted(rank.key[2] for rank in apart) == ["1", "2"]
    assert [rank.key[2] for rank in together] == ["", ""]


def test_the_owners_name_is_shown_if_the_machine_knows_it(run_dir: Path) -> None:
    names = {os.getuid(): "alice"}
    leave_record(run_dir, "r", ended_unix=NOW)
    (rank,) = RunDirectory([run_dir], Clock(NOW), policy=RankPolicy(lambda uid: names.get(uid, ""))).scan().ranks
    assert rank.user == "alice"
    info = next(family for family in Ranks().poll(RunDirectory([run_dir], Clock(NOW)).scan()) if "info" in family.name)
    assert [sample.labels["user"] for sample in info.samples] == [""]
