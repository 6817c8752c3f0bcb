"""Attack: fill the state directory, to remove another user's history, or to let a restart forget all users' runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from math import inf
from pathlib import Path

import pytest
from testing.judged_job import JudgedJob
from testing.records import publish
from testing.simulated_job import even
from tests.attacks.users import MALLORY, VICTIM, needs_root
from validation.siege.records import LONG

from rankscope.record import layout
from rankscope_exporter.job_report import saved
from rankscope_exporter.job_report.command import ReportRequest, show
from rankscope_exporter.ledger.account import GONE_LIMIT
from rankscope_exporter.ledger.owner_files import BYTES_PER_SECOND, FILE_LIMIT, OWNER_LIMIT, OWNERS_LIMIT, STATE_LIMIT
from rankscope_exporter.ranks import new_series
from rankscope_exporter.ranks.run_directory import ENDED_RANK_SECONDS

pytestmark = needs_root
OWNERS = range(100_000, 100_000 + OWNERS_LIMIT + 40)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def victim(run_dir: Path, state_dir: Path) -> JudgedJob:
    """Return a job of another user that has trained for a while."""
    job = JudgedJob(run_dir, ranks=2, state_dir=state_dir, run="mine")
    for path in run_dir.iterdir():
        os.chown(path, VICTIM, VICTIM)
    return job.trained(60)


def size(directory: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def written() -> int:
    """Return the bytes that this process has written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def start_runs(run_dir: Path, owners: Iterable[int], runs: int = 1, rank: int = 7, long: str = "") -> None:
    """Write a record of a rank of each run, which replaces the one before. The names of its phases are `long`."""
    phases = [f"{phase}-{long}" for phase in range(20)] if long else []
    for owner in owners:
        for number in range(runs):
            for before in run_dir.glob(f"{owner}.{number}.*"):
                before.unlink()
            labels = {"run": str(number), "rank": str(rank), "world_size": "64", "group": "0-63"}
            writer, path = publish(
                run_dir, f"{owner}.{number}.{rank}", {"started_monotonic": 1000.0}, **labels, phases=phases
            )
            for position in range(len(layout.PHASES) + len(phases)):
                writer.slots[layout.INDEX["phase_seconds"] + position] = 1 / 3
            os.chown(path, owner, owner)


def reported(state_dir: Path) -> int:
    """Return the exit status of the victim's report."""
    return show(ReportRequest(run="mine", owner=str(VICTIM), state_dir=state_dir))


def test_ended_runs_of_many_uids_remove_no_journal(run_dir: Path, state_dir: Path, victim: JudgedJob) -> None:
    victim.poll(victim.now, ended=range(2))
    assert reported(state_dir) == 0
    before = size(state_dir, f"journal-{VICTIM}*")
    start_runs(run_dir, OWNERS)
    victim.poll(victim.now + 1, ended=range(8))
    victim.diagnosis.close()
    assert reported(state_dir) == 0
    assert size(state_dir, f"journal-{VICTIM}*") == before
    assert len({path.name.split(".")[0].split("-")[1] for path in state_dir.iterdir()}) == OWNERS_LIMIT


def test_new_runs_of_many_uids_keep_no_present_owner_from_its_journal(
    run_dir: Path, state_dir: Path, victim: JudgedJob
) -> None:
    start_runs(run_dir, OWNERS)
    victim.poll(victim.now + 60)
    assert len([*state_dir.iterdir()]) == OWNERS_LIMIT
    victim.poll(victim.now + 61, ended=range(8))
    assert reported(state_dir) == 0


def test_many_runs_with_long_names_are_the_loss_of_their_owner_at_a_restart(
    run_dir: Path, state_dir: Path, victim: JudgedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_series, "BURST", inf)  # an owner may add these series within two hours
    for rank in range(GONE_LIMIT):
        start_runs(run_dir, [MALLORY], 128, rank, LONG)
        victim.poll(victim.now)
    victim.diagnosis.close()
    assert STATE_LIMIT // 2 < size(state_dir, f"state-{MALLORY}*") <= STATE_LIMIT
    lost = victim.diagnosis._lost["mine", str(VICTIM)]
    assert sum(lost.values()) > 0.0
    victim.start_exporter()
    assert [job.runs for job in saved.jobs(state_dir) if job.owner == str(VICTIM)] == [["mine"]]
    victim.job.run(100, even)
    victim.poll(victim.now)
    after = victim.diagnosis._lost["mine", str(VICTIM)]
    assert all(after[cause] >= seconds for cause, seconds in lost.items())


def test_runs_that_end_each_second_are_written_at_a_limited_rate(
    run_dir: Path, state_dir: Path, victim: JudgedJob
) -> None:
    start_runs(run_dir, [MALLORY], 128, long=LONG)
    began, before = time.monotonic(), written()
    for second in range(20):
        victim.poll(victim.now + second, ended=[7] if second % 2 else [])
    seconds = time.monotonic() - began
    # After the burst of each file, and with the last entry or state, which the rate then waits for.
    assert written() - before <= FILE_LIMIT + STATE_LIMIT + 2 * BYTES_PER_SECOND * seconds + OWNER_LIMIT // 8
    assert size(state_dir, f"*-{MALLORY}*") <= OWNER_LIMIT
    victim.poll(victim.now + 20, ended=range(2))
    assert reported(state_dir) == 0


def test_a_user_who_comes_after_an_attack_is_saved_again_when_its_journals_are_old(
    run_dir: Path, state_dir: Path
) -> None:
    for uid in OWNERS[:OWNERS_LIMIT]:
        (state_dir / f"journal-{uid}.jsonl").touch()
        os.utime(state_dir / f"journal-{uid}.jsonl", (0.0, 0.0))
    job = JudgedJob(run_dir, ranks=2, state_dir=state_dir, run="mine")
    for path in run_dir.iterdir():
        os.chown(path, VICTIM, VICTIM)
    job.train(20)
    job.poll(job.now + ENDED_RANK_SECONDS, ended=range(2))
    assert reported(state_dir) == 0
