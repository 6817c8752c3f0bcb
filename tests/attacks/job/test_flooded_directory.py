"""An attack: many files in the run directory, which a job's first step would list and read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from testing.records import publish
from tests.attacks.job.jobs import attack, run_job, train
from tests.attacks.users import MALLORY, needs_root

import rankscope
from rankscope.record import layout

FLOOD = """
for number in range(int(sys.argv[2])):
    Path(sys.argv[1], f"{number}.rank").touch()
"""
COUNT = """
opened = []
def listen(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".rank"):
        opened.append(arguments[0])
sys.addaudithook(listen)
step()
print(len(opened), attach.current().writer.path.exists())
"""


def dead_record(directory: Path, name: str, run: str = "job", age: float = 1e6) -> Path:
    """Publish the record of an ended rank. A reader in this process does not see its lock."""
    slots = {"started_unix": time.time() - age, "ended": layout.FINISHED}
    return publish(directory, name, slots, run=run)[1]


@needs_root
def test_a_job_opens_none_of_another_users_many_files(shared: Path) -> None:
    attack(FLOOD, shared, 2000)
    done = run_job(COUNT, shared)
    assert (done.stdout, done.stderr) == ("1 True\n", "")  # its own
    assert len(list(shared.iterdir())) == 2001


def test_a_job_reads_a_bounded_number_of_its_own_users_files(run_dir: Path) -> None:
    for number in range(2000):
        (run_dir / f"{number}.rank").touch()
    opened, is_published = run_job(COUNT, run_dir).stdout.split()
    assert int(opened) <= 257
    assert is_published == "True"


@pytest.mark.usefixtures("guest")
def test_a_job_looks_at_a_bounded_number_of_names(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.record.old_records.NAMES_LIMIT", 10)
    for number in range(30):
        dead_record(run_dir, str(number))
    rankscope.instrument()
    train()
    assert len(list(run_dir.iterdir())) == 30 - 10 + 1


@needs_root
@pytest.mark.usefixtures("guest")
def test_a_job_of_root_removes_only_its_own_old_records(shared: Path) -> None:
    mine, other_run = dead_record(shared, "mine"), dead_record(shared, "other", run="other", age=1.0)
    theirs = dead_record(shared, "theirs")
    os.chown(theirs, MALLORY, MALLORY)
    rankscope.instrument()
    train()
    assert not mine.exists()
    assert other_run.exists()
    assert theirs.exists()
