"""Changes of the node's clock in both directions: living ranks stay on the page, and ages and ends do not change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testing.clock import Clock
from testing.records import living_rank, publish

from rankscope.record import clock as record_clock
from rankscope.record import layout
from rankscope.record.clock import boot_id
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.run_directory import RunDirectory

NOW = 1_700_000_000.0
STEPS = (-86_400.0, -600.0, -30.0, 30.0, 600.0, 86_400.0)
STARTED, WORKED, SAVED = 300.0, 290.0, 100.0  # seconds ago, seconds of work, seconds ago
AGES = {
    "start_timestamp_seconds": STARTED,
    "last_progress_timestamp_seconds": STARTED - WORKED,
    "phase_since_timestamp_seconds": STARTED - WORKED,
    "checkpoint_last_timestamp_seconds": SAVED,
}


class NodeClocks:
    """A unix clock that can be set, and a monotonic clock."""

    def __init__(self) -> None:
        self.unix = Clock(NOW)
        self.monotonic = Clock(time.monotonic())

    def advance(self, seconds: float) -> None:
        self.unix.advance(seconds)
        self.monotonic.advance(seconds)

    def exporter(self, run_dir: Path) -> RunDirectory:
        return RunDirectory([run_dir], self.unix, monotonic=self.monotonic)

    def ages(self, directory: RunDirectory) -> dict[str, float]:
        """Return the ages of timestamps on the page, by the exporter's clock, as rules compute them."""
        samples = (sample for family in Ranks().poll(directory.scan()) for sample in family.samples)
        times = {one.name: one.value for one in samples if one.name.endswith("_timestamp_seconds")}
        return {name.removeprefix("rankscope_rank_"): self.unix.now - at for name, at in times.items()}

    def slots(self, clock_was: float = 0.0) -> dict[str, float]:
        """Return the slots of a working rank whose clock was `clock_was` seconds fast when it started."""
        start = self.unix.now - STARTED + clock_was
        return {
            "started_unix": start,
            "started_monotonic": self.monotonic.now - STARTED,
            "phase_seconds": WORKED,
            "checkpoints": 1,
            "checkpoint_last_unix": start + STARTED - SAVED,
        }


@pytest.fixture
def node() -> NodeClocks:
    return NodeClocks()


def are_nearly(ages: dict[str, float]) -> object:
    return pytest.approx(ages, abs=0.2)


@pytest.mark.parametrize("step", STEPS)
def test_setting_the_clock_changes_no_age_of_a_living_rank(run_dir: Path, node: NodeClocks, step: float) -> None:
    with living_rank(run_dir, slots=node.slots()):
        running = node.exporter(run_dir)
        assert node.ages(running) == are_nearly(AGES)
        node.unix.advance(step)
        assert node.ages(running) == are_nearly(AGES), "set while the exporter runs"
        assert node.ages(node.exporter(run_dir)) == are_nearly(AGES), "set before it starts"
        node.unix.advance(-step)
        assert node.ages(running) == are_nearly(AGES), "set back"


@pytest.mark.parametrize("wrong_by", STEPS)
def test_a_rank_that_started_with_a_wrong_clock_has_correct_ages_and_is_shown(
    run_dir: Path, node: NodeClocks, wrong_by: float
) -> None:
    with living_rank(run_dir, slots=node.slots(wrong_by)):
        directory = node.exporter(run_dir)
        assert node.ages(directory) == are_nearly(AGES)
        assert not directory.scan().skipped


def test_a_rank_without_progress_ages_by_the_elapsed_time(run_dir: Path, node: NodeClocks) -> None:
    with living_rank(run_dir, slots=node.slots()):
        directory, silent = node.exporter(run_dir), STARTED - WORKED
        for step in (600.0, -1200.0, 30.0, 0.0):
            node.unix.advance(step)
            node.advance(60)
            silent += 60
            assert node.ages(directory)["last_progress_timestamp_seconds"] == pytest.approx(silent, abs=0.2)


def test_a_living_rank_that_starts_in_the_future_on_the_monotonic_clock_is_refused(
    run_dir: Path, node: NodeClocks
) -> None:
    slots = node.slots() | {"started_monotonic": node.monotonic.now + 3600, "phase_seconds": 0.0}
    with living_rank(run_dir, slots=slots):
        assert node.exporter(run_dir).scan().skipped == {"future_start": 1}


def test_times_are_the_same_at_each_scan_while_the_clock_is_not_set(run_dir: Path, node: NodeClocks) -> None:
    with living_rank(run_dir, slots=node.slots()):
        directory = node.exporter(run_dir)
        for step in (0.0, 600.0):
            node.unix.advance(step)
            times = set()
            for number in range(5):
                node.unix.advance(1 + 0.01 * (-1) ** number)
                node.monotonic.advance(1)
                times.add(node.unix.now - node.ages(directory)["start_timestamp_seconds"])
            assert max(times) - min(times) < 1e-3


@contextmanager
def ended(run_dir: Path, node: NodeClocks, how: str, directory: RunDirectory | None = None) -> Iterator[Path]:
    """Yield the record of a rank that has just ended. If `directory` is given, it has seen the rank alive."""
    path = run_dir / "r.0.rank"
    if how == "killed":
        with living_rank(run_dir, slots=node.slots()) as rank:
            if directory:
                directory.scan()
            rank.kill()
            rank.wait()
            yield path
        return
    slots = node.slots()
    if how == "finished":
        slots |= {"ended": layout.FINISHED, "ended_unix": node.unix.now}
    publish(run_dir, slots=slots, boot_id=boot_id())
    if how == "sigterm":
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(layout.LAST_WORDS_OFFSET)
            file.write(b"Current thread")
        os.utime(path, (node.unix.now, node.unix.now))
    yield path


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["finished", "sigterm", "killed"])
def test_an_ended_rank_is_shown_for_ten_minutes_even_if_the_clock_is_set(
    run_dir: Path, node: NodeClocks, how: str, step: float
) -> None:
    directory = node.exporter(run_dir)
    with ended(run_dir, node, how, directory):
        assert node.ages(directory)["exit_timestamp_seconds"] == pytest.approx(0.0, abs=0.2)
        node.unix.advance(step)
        node.advance(300)
        assert node.ages(directory)["exit_timestamp_seconds"] == pytest.approx(300.0, abs=0.2)
        node.advance(299)
        assert directory.scan().ranks
        node.advance(2)
        assert not directory.scan().ranks


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["finished", "sigterm"])
def test_a_rank_that_ended_before_the_exporter_started_is_shown_for_at_most_ten_minutes(
    run_dir: Path, node: NodeClocks, how: str, step: float
) -> None:
    with ended(run_dir, node, how):
        node.advance(120)
        node.unix.advance(step)
        directory = node.exporter(run_dir)
        (rank,) = directory.scan().ranks
        assert rank.exit_unix is not None
        assert rank.snapshot.exit_reason == how
        # The end of a finished rank is known on the monotonic clock; a file's time is on the unix clock.
        least = 120.0 if how == "finished" else 0.0
        assert least - 0.2 <= node.unix.now - rank.exit_unix <= 120 + STARTED - WORKED + 0.2
        node.advance(601)
        assert not directory.scan().ranks


@pytest.mark.parametrize("step", STEPS)
def test_the_clock_can_be_set_at_the_moment_when_a_rank_ends(run_dir: Path, node: NodeClocks, step: float) -> None:
    directory = node.exporter(run_dir)
    with ended(run_dir, node, "killed", directory):
        node.advance(1)
        node.unix.advance(step)
        assert node.ages(directory)["exit_timestamp_seconds"] == pytest.approx(0.0, abs=1.2)


def test_the_age_of_a_record_of_another_boot_is_not_by_the_monotonic_clock(run_dir: Path, node: NodeClocks) -> None:
    slots = {"started_unix": NOW - 100, "started_monotonic": 1e8, "phase_seconds": 50.0}
    publish(run_dir, "old", {**slots, "ended": layout.FINISHED, "ended_unix": NOW - 50}, boot_id="another")
    (rank,) = node.exporter(run_dir).scan().ranks
    assert rank.exit_unix == NOW - 50
    assert rank.snapshot.unix(rank.snapshot.last_progress) == NOW - 50
    node.unix.advance(3600)
    assert not node.exporter(run_dir).scan().ranks


def test_without_a_boot_id_no_record_counts_as_of_this_boot(
    run_dir: Path, node: NodeClocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record_clock, "BOOT_ID", tmp_path / "missing")
    boot_id.cache_clear()
    try:
        publish(run_dir, "old", {"started_unix": NOW - 100, "started_monotonic": 1e8}, boot_id="")
        (rank,) = node.exporter(run_dir).scan().ranks
        assert rank.snapshot.unix_offset is None
    finally:
        boot_id.cache_clear()


def test_a_new_record_with_the_same_name_has_its_own_end(run_dir: Path, node: NodeClocks) -> None:
    directory = node.exporter(run_dir)
    with ended(run_dir, node, "killed", directory) as path:
        directory.scan()
        node.advance(500)
        path.unlink()
    with ended(run_dir, node, "killed", directory):
        assert node.ages(directory)["exit_timestamp_seconds"] == pytest.approx(0.0, abs=0.2)
