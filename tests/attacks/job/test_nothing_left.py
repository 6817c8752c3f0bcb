"""Attacks: no free descriptor, no space or no write permission when a rank starts its record."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.attacks.job.jobs import FOR_EACH, TRAIN, process, run_job
from tests.attacks.users import needs_root

from rankscope.record.reader import read_rank

IMPORT_ALL = """
import importlib
for name in rankscope.probes.late_probes():
    importlib.import_module(f"rankscope.probes.{name}")
"""
NO_DESCRIPTOR = f"""
{FOR_EACH}
def live(left):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (left + max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
    step()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    step()
    print("trained", flush=True)

for_each(range(int(os.environ["CASES"])), live)
"""


def test_a_job_without_free_descriptors_trains_with_a_record_or_with_one_warning(run_dir: Path) -> None:
    done = run_job(IMPORT_ALL + NO_DESCRIPTOR, run_dir, CASES="8")
    assert (done.returncode, done.stdout) == (0, "trained\n" * 8)
    records = [read_rank(path) for path in run_dir.iterdir()]
    warnings = done.stderr.splitlines()
    assert [record["steps"] for record in records] == [2.0]  # a rank's next record replaces the last
    assert 0 < len(warnings) < 8
    assert all("training continues: RANKSCOPE_RUN_DIR: [Errno 24]" in line for line in warnings)


def test_a_job_that_cannot_import_the_rest_of_the_hook_trains(run_dir: Path) -> None:
    done = run_job(NO_DESCRIPTOR, run_dir, CASES="1")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert sum(line.startswith("rankscope: ") for line in done.stderr.splitlines()) == 1


@needs_root
@pytest.mark.parametrize("options", ["size=16k", "ro", "nr_inodes=1"])
def test_a_full_or_read_only_file_system_causes_one_warning(run_dir: Path, options: str) -> None:
    mount = 'mount -t tmpfs -o "$1" none "$RANKSCOPE_RUN_DIR" || exit 99; shift; exec "$@"'
    job = process(0, TRAIN + "step(); step(); print('trained')")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", options, *job], check=False, capture_output=True, text=True
    )
    if done.returncode in (1, 99) and not done.stdout:
        pytest.skip(f"did not run: root cannot mount a file system here: {done.stderr}")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = done.stderr.splitlines()
    assert "training continues: RANKSCOPE_RUN_DIR: " in line
