"""A process may be killed at any instruction: its record is complete and shows that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testing.records import publish, rank_info

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank

JOB = Path(__file__).parents[1] / "jobs" / "killed.py"


@pytest.mark.parametrize("where", ["instructions", "moments"])
def test_a_rank_killed_at_any_point_leaves_a_complete_and_correct_record(run_dir: Path, where: str) -> None:
    environment = {**os.environ, "RANKSCOPE_RUN": "job", "RANKSCOPE_QUIET": "1"}
    command = [sys.executable, str(JOB), where, "100"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["errors"] == []
    assert result["endings"]["killed"] > 50  # the others were killed without a record
    assert result["files"] == 1


def test_an_incomplete_record_of_a_killed_process_does_not_block_the_next_with_its_id(run_dir: Path) -> None:
    (run_dir / ".r.0.rank").write_bytes(b"half")
    (run_dir / "r.1.rank").write_bytes(b"half")
    assert publish(run_dir)[1].name == "r.0.rank"
    assert publish(run_dir, "r.1")[1].name != "r.1.rank"


def test_a_new_info_does_not_change_the_old_one_before_it_is_complete(run_dir: Path) -> None:
    writer, path = publish(run_dir)
    for number in range(20):
        before = writer.slots[INDEX["info_place"]]
        content = path.read_bytes()
        writer.write_info(rank_info(groups=[str(number), "x" * 100 * number]))
        assert read_rank(path).info["groups"][0] == str(number)
        offset, length = map(int, divmod(before, layout.INFO_OFFSET_UNIT))
        old = slice(layout.INFO_OFFSET + offset, layout.INFO_OFFSET + offset + length)
        assert path.read_bytes()[old] == content[old]
