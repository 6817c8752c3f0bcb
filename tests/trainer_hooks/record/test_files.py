"""A record is read as it was written or refused with a reason; the file alone shows whether the rank is alive."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from pathlib import Path

import pytest
from testing.programs import python, running
from testing.records import living_rank, publish, rank_info

from rankscope.record import layout, reader
from rankscope.record.directory import opened
from rankscope.record.layout import INDEX
from rankscope.record.old_records import remove_old_records
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

BUSY_WRITER = """
import mmap, struct, sys
file = open(sys.argv[1], "r+b")
slots = memoryview(mmap.mmap(file.fileno(), 0))[:1600].cast("d")
patterns = [struct.unpack("d", bytes([byte]) * 8)[0] for byte in (0x11, 0xEE)]
print("ready", flush=True)
while True:
    for pattern in patterns:
        for index in range(200):
            slots[index] = pattern
"""


def refusal(path: Path) -> str:
    with pytest.raises(UnreadableRecordError) as caught:
        read_rank(path)
    return caught.value.reason


def test_slots_and_info_are_read_as_written(run_dir: Path) -> None:
    writer, path = publish(run_dir, phases=["tokenize"], settings={})
    writer.slots[INDEX["steps"]] = 7
    snapshot = read_rank(path)
    assert snapshot["steps"] == 7
    assert snapshot.info == rank_info(phases=["tokenize"], settings={})
    assert list(snapshot.phase_seconds)[-1] == "tokenize"


def test_a_record_is_alive_until_its_process_ends(run_dir: Path) -> None:
    with living_rank(run_dir) as rank:
        assert read_rank(run_dir / "r.0.rank").alive
        rank.end()
        assert read_rank(run_dir / "r.0.rank").exit_reason == "killed"


def test_a_truncated_file_is_refused(run_dir: Path) -> None:
    _, path = publish(run_dir)
    content = path.read_bytes()
    for length in (0, 10, layout.SIZE - 1):
        (run_dir / "short.rank").write_bytes(content[:length])
        assert refusal(run_dir / "short.rank") == "truncated"


@pytest.mark.parametrize(
    ("field", "value"), [("steps", float("nan")), ("phase", 99.0), ("info_place", 1e12), ("info_place", -1.0)]
)
def test_invalid_values_are_refused(run_dir: Path, field: str, value: float) -> None:
    content = bytearray(publish(run_dir)[1].read_bytes())
    struct.pack_into("d", content, layout.SLOTS_OFFSET + 8 * INDEX[field], value)
    path = run_dir / "odd.rank"
    path.write_bytes(content)
    assert refusal(path) == "foreign"


def test_a_record_of_another_version_is_refused_as_such(run_dir: Path) -> None:
    content = bytearray(publish(run_dir)[1].read_bytes())
    struct.pack_into("<I", content, 8, layout.VERSION + 1)
    path = run_dir / "newer.rank"
    path.write_bytes(content)
    assert refusal(path) == "version"


def test_user_phases_that_repeat_a_name_are_refused(run_dir: Path) -> None:
    _, path = publish(run_dir, phases=["forward"])
    assert refusal(path) == "foreign"


def test_publishing_into_a_missing_directory_leaves_the_writer_counting(run_dir: Path) -> None:
    writer = RankWriter()
    with pytest.raises(OSError, match="missing"):
        writer.publish(run_dir / "missing", "r.0", rank_info())
    writer.slots[INDEX["steps"]] += 1
    assert writer.slots[INDEX["steps"]] == 1


def test_an_info_that_does_not_fit_is_refused_and_leaves_no_file(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="8192 fit"):
        RankWriter().publish(run_dir, "r.0", {"run": "x" * layout.INFO_CAPACITY})
    assert list(run_dir.iterdir()) == []


def test_a_reader_never_sees_half_of_an_info(run_dir: Path) -> None:
    writer, path = publish(run_dir)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for letter in "ab":
                writer.write_info(rank_info(run=letter * 3000))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(UnreadableRecordError):  # the writer never pauses, so every attempt may fail
                assert len(set(read_rank(path).info["run"])) == 1
    finally:
        stop.set()
        thread.join()


def test_a_store_is_atomic(run_dir: Path) -> None:
    path = run_dir / "busy"
    path.write_bytes(bytes(layout.SIZE))
    with running(*python(BUSY_WRITER, path)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            seen = {value for _ in range(20_000) for value in set(struct.unpack("200d", os.pread(descriptor, 1600, 0)))}
        finally:
            os.close(descriptor)
    assert {struct.pack("d", value) for value in seen} <= {bytes(8), b"\x11" * 8, b"\xee" * 8}


def test_a_phase_is_open_since_the_last_event_and_an_absorbing_one_since_its_start(run_dir: Path) -> None:
    now = 100.0
    writer = RankWriter()
    timeline = Timeline(writer, lambda: now)
    timeline.step()  # ends startup
    writer.publish(run_dir, "r.0", rank_info())
    assert writer.path is not None
    found = []
    for phase in (layout.FORWARD, layout.EVALUATION):
        now += 1
        opened = timeline.enter(phase)
        now += 2
        timeline.leave(timeline.enter(layout.DATA_WAIT))
        now += 4
        snapshot = read_rank(writer.path)
        found.append((snapshot.phase, now - snapshot.phase_since))
        timeline.leave(opened)
    snapshot = read_rank(writer.path)
    found.append((snapshot.phase, now - snapshot.phase_since))
    assert found == [("forward", 4.0), ("evaluation", 6.0), ("other", 0.0)]


@pytest.mark.parametrize("size", [0, 100, layout.SIZE - 1])
def test_an_incomplete_record_of_a_killed_process_is_removed_by_the_next(run_dir: Path, size: int) -> None:
    (run_dir / ".r.0.1.rank").write_bytes(layout.header().ljust(layout.SIZE, b"\0")[:size])
    (run_dir / "r.0.2.rank").write_bytes(b"")  # not by a writer, which renames only complete files
    with opened(run_dir) as directory:
        remove_old_records(run_dir, directory, rank_info())
    assert [path.name for path in run_dir.iterdir()] == ["r.0.2.rank"]


def test_a_rank_whose_incomplete_record_is_removed_takes_another_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def write_after_another_rank_has_begun(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        with opened(run_dir) as directory:
            remove_old_records(run_dir, directory, rank_info())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_after_another_rank_has_begun)
    _, path = publish(run_dir)
    assert path != run_dir / "r.0.rank"
    assert read_rank(path).info == rank_info()


def test_the_last_words_of_a_record_are_not_those_of_the_next_one(run_dir: Path) -> None:
    writer, path = publish(run_dir)
    os.write(writer.fileno(), b"File")
    assert read_rank(path).exit_reason == "sigterm"
    writer.detach()
    writer.publish(run_dir, "r.1", rank_info())
    assert read_rank(run_dir / "r.1.rank").exit_reason == "killed"


@pytest.mark.parametrize(("phases", "is_remembered"), [(1, True), (20, False)])
def test_an_info_is_remembered_unless_it_is_large(run_dir: Path, phases: int, is_remembered: bool) -> None:
    _, path = publish(run_dir, phases=[f"{number}" + "\N{GRINNING FACE}" * 60 for number in range(phases)])
    read_rank(path)
    before = reader._parsed.cache_info().hits
    read_rank(path)
    assert reader._parsed.cache_info().hits - before == is_remembered
