"""An attack or a mistake: `: > RUN_DIR/x.rank` truncates the mapping, and the next store raises SIGBUS."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from testing.records import publish
from tests.attacks.job.jobs import run_job
from tests.attacks.users import VICTIM, needs_root

from rankscope.record.reader import read_rank

TRUNCATED_BY_THE_SHELL = """
step()
path = str(attach.current().writer.path)
done = subprocess.run(["sh", "-c", ': > "$1"', "sh", path], capture_output=True, text=True)
step()
print(done.returncode, "Permission denied" in done.stderr, stat.filemode(os.stat(path).st_mode))
"""


@needs_root
def test_the_jobs_own_user_cannot_truncate_its_record_by_mistake(shared: Path) -> None:
    done = run_job(TRUNCATED_BY_THE_SHELL, shared, VICTIM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 True -r--r--r--\n"
    (path,) = shared.iterdir()
    assert read_rank(path)["steps"] == 2


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_record_is_readable_by_all_users_and_writable_by_none_with_any_umask(run_dir: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        _, path = publish(run_dir)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_deleted_record_does_not_harm_the_job(run_dir: Path) -> None:
    done = run_job("step(); attach.current().writer.path.unlink(); step(); print('continues')", run_dir)
    assert (done.returncode, done.stdout) == (0, "continues\n")
    [record] = run_dir.glob("*.rank")
    assert done.stderr == f"rankscope: this rank's record was removed; recorded again: {record}\n"


@pytest.mark.parametrize("mode", [0o444, 0o644])
def test_a_record_is_read_with_any_mode(run_dir: Path, mode: int) -> None:
    _, path = publish(run_dir)
    path.chmod(mode)
    assert read_rank(path).info["run"] == "r"
