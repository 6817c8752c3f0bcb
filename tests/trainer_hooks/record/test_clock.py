"""The node's clocks, and a record's unix times, which all belong to the newest setting when one is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testing.clock import Clock
from testing.records import publish

from rankscope.process.ending import Ending
from rankscope.record import layout
from rankscope.record.clock import NodeClock, boot_id
from rankscope.record.directory import opened
from rankscope.record.layout import INDEX
from rankscope.record.old_records import RECORD_LIFETIME, remove_old_records
from rankscope.record.reader import read_rank
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

NOW = 1_700_000_000.0
STEPS = (-86_400.0, -600.0, -0.2, 0.2, 600.0, 86_400.0)


def test_a_time_keeps_its_unix_time_while_the_clock_is_only_slewed() -> None:
    unix, monotonic = Clock(NOW), Clock(100.0)
    clock = NodeClock(unix, monotonic)
    offset = clock.offset()
    for _ in range(9):
        unix.advance(1.01)
        monotonic.advance(1.0)
        assert clock.offset() == offset


@pytest.mark.parametrize("step", STEPS)
def test_a_time_has_another_unix_time_after_the_clock_is_set(step: float) -> None:
    unix, monotonic = Clock(NOW), Clock(100.0)
    clock = NodeClock(unix, monotonic)
    unix.advance(step)
    assert clock.offset() == pytest.approx(NOW - 100 + step)


def test_a_boot_has_an_id() -> None:
    assert boot_id()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that shifts the clock of this process."""
    real = time.time
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_ends_after_the_clock_was_set_has_all_times_by_the_new_setting(
    set_clock: Callable[[float], None], step: float
) -> None:
    writer = RankWriter()
    timeline = Timeline(writer)
    timeline.checkpoints.end(timeline.checkpoints.begin(), 10.0)
    set_clock(step)
    Ending(writer, lambda: None).write(layout.FINISHED)
    now = time.time()
    for field in ("started_unix", "checkpoint_last_unix", "ended_unix"):
        assert writer.slots[INDEX[field]] == pytest.approx(now, abs=0.15)


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_after_the_clock_was_set_changes_the_start_to_the_same_setting(
    set_clock: Callable[[float], None], step: float
) -> None:
    writer = RankWriter()
    timeline = Timeline(writer)
    set_clock(step)
    later = timeline.checkpoints
    later.end(later.begin(), 10.0)
    assert writer.slots[INDEX["started_unix"]] == pytest.approx(time.time(), abs=0.15)
    assert writer.slots[INDEX["checkpoint_last_unix"]] == pytest.approx(time.time(), abs=0.15)


@pytest.mark.usefixtures("old_boot")
@pytest.mark.parametrize("clock_error", STEPS)
@pytest.mark.parametrize(("ago", "is_kept"), [(60.0, True), (RECORD_LIFETIME + 60, False)])
def test_a_records_age_does_not_depend_on_its_ranks_clock(
    run_dir: Path, clock_error: float, ago: float, is_kept: bool
) -> None:
    slots = {"started_unix": time.time() - ago + clock_error, "started_monotonic": time.monotonic() - ago}
    _, path = publish(run_dir, slots=slots, boot_id=boot_id())
    with opened(run_dir) as directory:
        remove_old_records(run_dir, directory, {"run": "another", "rank": "0"})
    assert path.exists() == is_kept


def test_a_record_of_another_boot_has_its_times_by_the_clock_at_its_start(run_dir: Path) -> None:
    _, path = publish(run_dir, slots={"started_unix": NOW, "started_monotonic": 1e9}, boot_id="another")
    assert read_rank(path).unix(1e9 + 5) == NOW + 5
