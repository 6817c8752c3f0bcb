"""The limits of the state directory: bytes and writes of each owner, and the number of owners."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter.ledger import journal, owner_files, state_file
from rankscope_exporter.ledger.owner_files import (
    ANALYZER_DIRECTORY_LIMIT,
    BYTES_PER_SECOND,
    DIRECTORY_LIMIT,
    FILE_LIMIT,
    GPU_OWNERS,
    GPU_OWNERS_LIMIT,
    KEPT_SECONDS,
    OWNER_LIMIT,
    OWNERS_LIMIT,
    STATE_LIMIT,
    OwnerFiles,
)
from rankscope_exporter.ledger.state_file import StateFiles
from rankscope_exporter.ranks import principals
from rankscope_exporter.ranks.principals import SubordinateIds

ROOT = Path(__file__).parents[3]


@pytest.fixture
def now() -> SimpleNamespace:
    """Return the time of both clocks."""
    return SimpleNamespace(unix=2e9, monotonic=1000.0)


@pytest.fixture
def files(state_dir: Path, now: SimpleNamespace) -> OwnerFiles:
    return owner_files_at(state_dir, now)


def owner_files_at(state_dir: Path, now: SimpleNamespace) -> OwnerFiles:
    return OwnerFiles(state_dir, lambda: now.unix, lambda: now.monotonic)


def runs(state_dir: Path) -> list[str]:
    """Return the runs in the journals."""
    return [entry["run"] for entry in journal.read(state_dir)]


def saved(state_dir: Path) -> list[list[str]]:
    """Return the runs whose state is saved."""
    return [state["run"] for state in state_file.read(state_dir)]


def size(state_dir: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in state_dir.glob(pattern))


def append(files: OwnerFiles, *owners: object, run: str = "") -> None:
    """Append a run of each owner, with the owner's name or this one, to the journals."""
    for owner in owners:
        journal.Journal(files).append(str(owner), {"run": run or str(owner)})


def save(files: OwnerFiles, *runs: tuple[str, str], text: str = "", is_last: bool = False) -> None:
    StateFiles(files).save(0.0, {"account": [[*run, {"text": text}] for run in runs]}, is_last=is_last)


def test_the_journal_is_bounded_for_each_owner_and_keeps_the_newest(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    written = journal.Journal(files)
    written.append("1000", {"run": "kept"})
    for number in range(3000):
        written.append("1001", {"run": f"{number}", "text": "x" * 200})
        now.monotonic += 1.0
    assert runs(state_dir).count("kept") == 1
    assert runs(state_dir)[-1] == "2999"
    assert size(state_dir, "journal-1001*") <= 2 * FILE_LIMIT
    assert len(runs(state_dir)) > 1000


def test_a_too_large_entry_is_dropped_and_logged_once(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    written = journal.Journal(files)
    written.append("1000", {"run": "kept"})
    for _ in range(3):
        now.monotonic += FILE_LIMIT
        written.append("1000", {"run": "large", "text": "x" * FILE_LIMIT})
    now.monotonic += FILE_LIMIT
    written.append("1000", {"run": "next"})
    assert runs(state_dir) == ["kept", "next"]
    assert len(caplog.records) == 1


def test_a_journal_is_written_at_a_limited_rate_after_a_burst(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    written, entry = journal.Journal(files), {"run": "often", "text": "x" * 1000}
    for _ in range(1000):
        written.append("1001", entry)
    assert size(state_dir) == pytest.approx(FILE_LIMIT, rel=0.01)
    assert len(caplog.records) == 1
    written.append("1000", {"run": "of another owner"})
    now.monotonic += 2.0
    before = len(runs(state_dir))
    for _ in range(1000):
        written.append("1001", entry)
    assert len(runs(state_dir)) - before == pytest.approx(2 * BYTES_PER_SECOND / 1000, abs=1)
    assert "of another owner" in runs(state_dir)


def test_new_owners_remove_nothing_of_the_last_days(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(OWNERS_LIMIT + 10):
        append(files, number)
        now.unix += 1.0
    assert sorted(map(int, runs(state_dir))) == [*range(OWNERS_LIMIT)]
    assert len(caplog.records) == 1
    save(files, *((str(number), str(number)) for number in range(OWNERS_LIMIT + 10)))
    assert sorted(int(owner) for _, owner in saved(state_dir)) == [*range(OWNERS_LIMIT)]


def test_a_new_owner_replaces_the_one_that_was_not_seen_for_a_week(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    append(files, *range(OWNERS_LIMIT))
    now.unix += KEPT_SECONDS
    save(files, ("again", "0"))
    append(files, 7000, run="new")
    assert "new" in runs(state_dir)
    assert "0" in runs(state_dir), "it still has runs"
    assert "1" not in runs(state_dir)
    assert len(runs(state_dir)) == OWNERS_LIMIT


def test_a_restarted_exporter_knows_the_owners_and_when_they_were_seen(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    append(files, *range(OWNERS_LIMIT))
    for path in state_dir.iterdir():
        os.utime(path, (now.unix, now.unix))
    append(owner_files_at(state_dir, now), 7000, run="new")
    assert "new" not in runs(state_dir)
    now.unix += KEPT_SECONDS
    append(owner_files_at(state_dir, now), 7000, run="new")
    assert "new" in runs(state_dir)
    assert len(runs(state_dir)) == OWNERS_LIMIT


def filled(files: OwnerFiles, now: SimpleNamespace, *with_gpu: str) -> None:
    """Add as many owners as fit, of whom these have a GPU; afterwards none has."""
    files.set_on_gpu(with_gpu)
    for number in range(OWNERS_LIMIT):
        append(files, number)
        now.unix += 1.0
    files.set_on_gpu([])


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_owner_with_a_gpu_replaces_the_newest_that_has_had_none(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace, is_restarted: bool
) -> None:
    filled(files, now, "126", "127")
    if is_restarted:
        for number in range(OWNERS_LIMIT):
            os.utime(state_dir / f"journal-{number}.jsonl", (now.unix + number, now.unix + number))
        files = owner_files_at(state_dir, now)
    append(files, 7000, run="without")
    files.set_on_gpu(["7001"])
    append(files, 7001, run="with")
    kept = {*map(str, range(OWNERS_LIMIT))} - {"125"}
    assert {*runs(state_dir)} == {*kept, "with"}
    files.set_on_gpu([])
    append(files, 125, run="again")
    assert {*runs(state_dir)} == {*kept, "with"}


def test_no_new_owner_replaces_one_that_has_had_a_gpu(state_dir: Path, files: OwnerFiles, now: SimpleNamespace) -> None:
    filled(files, now, *map(str, range(OWNERS_LIMIT)))
    files.set_on_gpu(["7001"])
    append(files, 7001, run="with")
    assert {*runs(state_dir)} == {*map(str, range(OWNERS_LIMIT))}


def test_the_mark_of_a_gpu_is_kept_with_the_owners_files_only(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    filled(files, now, *map(str, range(OWNERS_LIMIT)))
    now.unix += 2 * KEPT_SECONDS
    for number in range(5000, 5000 + 2 * OWNERS_LIMIT):
        files.set_on_gpu([str(number)])
        append(files, number, run="later")
    assert (state_dir / GPU_OWNERS).stat().st_size <= GPU_OWNERS_LIMIT
    assert size(state_dir) < DIRECTORY_LIMIT
    (state_dir / GPU_OWNERS).write_bytes(b'{"owner": 5000}\n\xff[')
    owner_files_at(state_dir, now)


def test_an_owner_without_runs_and_without_a_journal_leaves_room(state_dir: Path, files: OwnerFiles) -> None:
    save(files, *((f"r{number}", str(number)) for number in range(OWNERS_LIMIT)))
    save(files, ("r", "7000"))
    save(files, ("r", "7000"))
    assert saved(state_dir) == [["r", "7000"]]


def test_a_range_of_subordinate_uids_has_the_files_of_its_user(
    state_dir: Path, files: OwnerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subuid").write_text("1001:100000:65536\n")
    ids = SubordinateIds(tmp_path / "subuid")
    ids.refresh()
    assert ids.principal(100_000)
    ids.refresh()
    monkeypatch.setattr(principals, "principal", ids.principal)
    append(files, 1001, *range(100_000, 100_010))
    save(files, ("a", "100000"), ("b", "1001"))
    assert {path.name for path in state_dir.iterdir()} == {"journal-1001.jsonl", "state-1001.jsonl"}
    assert len(runs(state_dir)) == 11
    assert saved(state_dir) == [["a", "100000"], ["b", "1001"]]


def test_what_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = OwnerFiles(tmp_path / "absent")
    written, states = journal.Journal(files), StateFiles(files)
    for _ in range(3):
        written.append("1000", {})
        states.save(0.0, {"account": [["r", "1000", {}]]}, is_last=True)
    assert sorted(record.message[:16] for record in caplog.records) == ["cannot save the ", "cannot write the"]


def test_a_partial_line_does_not_affect_other_entries(state_dir: Path, files: OwnerFiles) -> None:
    written = journal.Journal(files)
    written.append("1000", {"run": "a"})
    with (state_dir / "journal-1000.jsonl").open("a") as file:
        file.write('{"run": "b", \n[1]\n')
    written.append("1000", {"run": "c"})
    assert runs(state_dir) == ["a", "c"]


def test_a_too_large_state_loses_the_owners_newest_runs_and_is_logged_once(
    state_dir: Path, files: OwnerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    many = [(f"r{number}", "1001") for number in range(100)]
    for _ in range(2):
        save(files, ("mine", "1000"), *many, text="x" * (STATE_LIMIT // 10), is_last=True)
    kept = [run for run, owner in saved(state_dir) if owner == "1001"]
    assert kept == [run for run, _ in many[: len(kept)]]
    assert 8 <= len(kept) <= 10
    assert ["mine", "1000"] in saved(state_dir)
    assert size(state_dir, "state-1001*") <= STATE_LIMIT
    assert len(caplog.records) == 1


def test_a_large_state_is_saved_less_often_and_always_at_the_end(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    save(files, ("a", "1000"), ("a", "1001"), text="x" * (10 * BYTES_PER_SECOND))
    now.monotonic += 5.0
    save(files, ("b", "1000"), ("b", "1001"), ("b", "1002"))
    assert saved(state_dir) == [["a", "1000"], ["a", "1001"], ["b", "1002"]]
    now.monotonic += 10.0
    save(files, ("c", "1000"), ("a", "1001"))
    assert saved(state_dir) == [["c", "1000"], ["a", "1001"]]
    save(files, ("d", "1000"), ("d", "1001"), is_last=True)
    assert saved(state_dir) == [["d", "1000"], ["d", "1001"]]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe", b"[1]\n", b'{"version": 1}\n', b'{"version":2,"run":["large","1001"],"x":"', b"[" * 10**5]
)
def test_a_damaged_or_oversized_state_of_one_owner_affects_no_other(
    state_dir: Path, files: OwnerFiles, damage: bytes
) -> None:
    save(files, ("kept", "1000"), ("kept", "1001"), ("kept", "1002"))
    with (state_dir / "state-1001.jsonl").open("ab") as file:
        file.write(damage + b"x" * STATE_LIMIT)
    assert [state["run"] for state in StateFiles(files).load()] == [["kept", str(1000 + n)] for n in range(3)]


def test_an_unreadable_state_of_one_owner_affects_no_other(
    state_dir: Path, files: OwnerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    save(files, ("kept", "1000"))
    (state_dir / "state-1001.jsonl").mkdir()
    assert [state["run"] for state in StateFiles(files).load()] == [["kept", "1000"]]
    assert "ignoring the saved state" in caplog.text


def test_the_state_of_an_earlier_version_is_removed(state_dir: Path, files: OwnerFiles) -> None:
    (state_dir / "findings.json").write_text(json.dumps({"version": 1, "at": 0.0, "runs": []}))
    assert not [*StateFiles(files).load()]
    assert not [*state_dir.iterdir()]


def test_the_remembered_files_of_owners_who_keep_changing_are_limited(files: OwnerFiles, now: SimpleNamespace) -> None:
    for uid in range(20 * OWNERS_LIMIT):
        files.count(files.path("state", str(uid)), 1)
        now.monotonic += 1.0
    assert len(files._next) <= 4 * OWNERS_LIMIT + 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set limits that a test can reach."""
    limits: dict[str, Any] = {"FILE_LIMIT": FILE_LIMIT // 64, "STATE_LIMIT": STATE_LIMIT // 64}
    for module in (owner_files, journal, state_file):
        for name, value in limits.items():
            monkeypatch.setattr(module, name, value, raising=False)
    return limits


@pytest.mark.usefixtures("small")
def test_a_directory_that_many_owners_fill_is_within_the_sum_of_the_limits(
    state_dir: Path, files: OwnerFiles, now: SimpleNamespace
) -> None:
    written, states = journal.Journal(files), StateFiles(files)
    uids = [str(uid) for uid in range(OWNERS_LIMIT + 20)]
    for _ in range(30):
        now.monotonic += 1000.0
        for uid in uids:
            written.append(uid, {"run": "r", "text": "x" * 700})
        of_runs = [[f"r{number}", uid, {"text": "x" * 700}] for uid in uids for number in range(20)]
        states.save(0.0, {"account": of_runs}, is_last=False)
    allowed = OWNERS_LIMIT * OWNER_LIMIT // 64
    assert 0.8 * allowed < size(state_dir) <= allowed


def test_the_volumes_of_the_state_are_larger_than_the_sum_of_the_limits() -> None:
    files = [ROOT / "deploy/kustomize/rankscope.yaml", *(ROOT / "examples/kubernetes/sidecar").glob("*job*.yaml")]
    for path in files:
        volumes = re.findall(r"emptyDir: {sizeLimit: (\d+)Mi}", path.read_text())
        assert volumes, path
        assert all(int(volume) * 2**20 > 1.1 * DIRECTORY_LIMIT for volume in volumes), path
    assert len(files) > 1
    template = (ROOT / "deploy/helm/rankscope/templates/analyzer.yaml").read_text()
    of_analyzer = re.findall(r"sizeLimit: (\d+)Mi", template)
    assert [int(volume) * 2**20 > 1.1 * ANALYZER_DIRECTORY_LIMIT for volume in of_analyzer] == [True]
