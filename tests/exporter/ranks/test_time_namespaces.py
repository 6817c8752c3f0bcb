"""Ranks and readers in time namespaces, whose monotonic clocks are ahead of or behind the machine's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path

import pytest
from testing.programs import python, running
from testing.records import living_rank, publish, rank_info
from testing.waiting import eventually

from rankscope.record import clock as record_clock
from rankscope.record.clock import MACHINE, Clocks, own_clocks
from rankscope.record.old_records import remove_old_records
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope_exporter.ranks.run_directory import RunDirectory

OFFSETS = [(1_000_000, 1_000_000), (1_000_000, 0), (0, 1_000_000), (-5, -5)]  # monotonic, boottime
SHIFT = 86_400.0

RANK = """
import os, sys, time
from pathlib import Path
from rankscope.publication import Publication
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from testing.records import rank_info
writer = RankWriter()
timeline = Timeline(writer)
info = rank_info(**Publication(writer, dict).info())
for _ in range(3):
    opened = timeline.enter(layout.FORWARD)
    time.sleep(0.02)
    timeline.leave(opened)
    timeline.step()
timeline.enter(layout.CHECKPOINT)
writer.publish(Path(os.environ["RANKSCOPE_RUN_DIR"]), "r.0", info)
print("ready", flush=True)
sys.stdin.read()
"""
READ = """
import json, os, time
from pathlib import Path
from rankscope_exporter.ranks.run_directory import RunDirectory
scan = RunDirectory([Path(os.environ["RANKSCOPE_RUN_DIR"])]).scan(with_steps=True)
found = [rank.snapshot for rank in scan.ranks]
print(json.dumps([[one.alive, one.read_monotonic - one.last_progress, one.read_monotonic - one.phase_since,
    time.time() - one.unix_field("started_unix"), one.read_monotonic - one.steps_after(0)[-1].end] for one in found]))
"""


def in_namespace(monotonic: int, boottime: int, command: list[object]) -> list[object]:
    """Return a command that runs in a time namespace with these offsets, in seconds."""
    offsets = [f"--monotonic={monotonic}", f"--boottime={boottime}"]
    return ["unshare", "--time", *offsets, "--fork", "--kill-child", *command]


def can_unshare() -> bool:
    command = [*map(str, in_namespace(0, 0, ["true"]))]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True, check=False).returncode


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="did not run: needs root and time namespaces")


def ages(command: list[object]) -> list[float]:
    """Return by a reader: whether the only rank is alive, and the ages of its progress, phase, start and last step."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return [float(value) for value in found]


@needs_namespaces
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(("rank_is_in_it", "reader_is_in_it"), [(True, False), (False, True), (True, True)])
@pytest.mark.usefixtures("run_dir")
def test_a_rank_has_the_same_ages_for_a_reader_in_another_time_namespace(
    offsets: tuple[int, int], rank_is_in_it: bool, reader_is_in_it: bool
) -> None:
    rank, read = python(RANK), python(READ)
    began = time.time()
    with running(*(in_namespace(*offsets, rank) if rank_is_in_it else rank)):
        alive, *found = ages(in_namespace(*offsets, read) if reader_is_in_it else read)
    assert alive
    assert all(0.0 <= age <= time.time() - began for age in found), found


@needs_namespaces
def test_an_ended_rank_of_a_time_namespace_was_killed_just_now(run_dir: Path) -> None:
    with running(*in_namespace(*OFFSETS[0], python(RANK))) as rank:
        directory = RunDirectory([run_dir])
        assert directory.scan().ranks[0].snapshot.alive
        rank.kill()
        eventually(lambda: not directory.scan().ranks[0].snapshot.alive)
    (ended,) = directory.scan().ranks
    assert ended.snapshot.exit_reason == "killed"
    assert ended.exit_unix == pytest.approx(time.time(), abs=10.0)
    assert ended.snapshot.unix(ended.snapshot.last_progress) == pytest.approx(time.time(), abs=10.0)


def test_times_are_converted_to_the_readers_clock(run_dir: Path) -> None:
    now = time.monotonic()
    slots = {"started_monotonic": now + SHIFT - 20, "started_unix": time.time() - 20, "phase_seconds": 10.0}
    with living_rank(run_dir, slots=slots, clocks=[SHIFT, SHIFT]):
        scan = RunDirectory([run_dir]).scan()
    assert not scan.skipped
    snapshot = scan.ranks[0].snapshot
    assert (snapshot["started_monotonic"], snapshot.last_progress) == pytest.approx((now - 20, now - 10))
    assert snapshot["phase_since"] == 0.0, "no time of a phase that absorbs what it contains"


def test_a_rank_of_another_clock_without_its_offset_is_refused(run_dir: Path) -> None:
    with living_rank(run_dir, slots={"started_monotonic": time.monotonic() + SHIFT, "started_unix": time.time()}):
        assert RunDirectory([run_dir]).scan().skipped == {"future_start": 1}


def test_an_old_record_of_another_clock_is_removed_after_its_lifetime(run_dir: Path) -> None:
    start = {"started_monotonic": time.monotonic() + SHIFT - 1000, "started_unix": time.time() - 1000}
    _, path = publish(run_dir, slots={**start, "ended": 1.0, "ended_unix": time.time() - 900}, clocks=[SHIFT, SHIFT])
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        remove_old_records(run_dir, descriptor, rank_info(run="another"))
    finally:
        os.close(descriptor)
    assert not path.exists()


@pytest.mark.parametrize("clocks", [5, None, [1.0], ["a", "b"], [math.nan, 0.0], [10**90, 0.0], {"monotonic": 1.0}])
def test_invalid_offsets_are_refused(run_dir: Path, clocks: object) -> None:
    _, path = publish(run_dir, clocks=clocks)
    with pytest.raises(UnreadableRecordError, match="unexpected structure"):
        read_rank(path)


def make_process(directory: Path, offsets: str, of_children: str = "time:[1]") -> Path:
    (directory / "ns").mkdir()
    (directory / "ns/time").symlink_to("time:[1]")
    (directory / "ns/time_for_children").symlink_to(of_children)
    (directory / "timens_offsets").write_text(offsets)
    return directory


@pytest.mark.parametrize(
    ("offsets", "of_children", "clocks"),
    [
        ("monotonic  1000000  500000000\nboottime  -7  250000000\n", "time:[1]", Clocks(1_000_000.5, -6.75)),
        ("monotonic  0  0\nboottime  0  0\n", "time:[1]", MACHINE),
        ("monotonic  1000000  0\nboottime  5  0\n", "time:[2]", MACHINE),
        ("something else", "time:[1]", MACHINE),
    ],
)
def test_the_offsets_are_those_of_the_process_and_not_of_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offsets: str, of_children: str, clocks: Clocks
) -> None:
    monkeypatch.setattr(record_clock, "PROCESS", make_process(tmp_path, offsets, of_children))
    assert own_clocks() == clocks


def test_a_kernel_without_time_namespaces_has_the_machines_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_clock, "PROCESS", tmp_path)
    assert own_clocks() == MACHINE
