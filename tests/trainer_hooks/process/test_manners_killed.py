"""A process may be killed at any instruction: its record says so, and is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope.record.writer import RankWriter

JOB = Path(__file__).parents[1] / "jobs" / "killed.py"
INFO = {"run": "r", "rank": "0"}


@pytest.mark.parametrize("where", ["instructions", "moments"])
def test_a_rank_that_is_killed_at_any_point_leaves_a_record_that_is_whole_and_true(run_dir: Path, where: str) -> None:
    environment = {**os.environ, "RANKSCOPE_RUN": "job", "RANKSCOPE_QUIET": "1"}
    command = [sys.executable, str(JOB), where, "100"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["lies"] == []
    assert result["endings"]["killed"] > 50  # the others were killed before they had a record
    assert result["files"] == 1


def test_what_a_killed_process_left_half_made_does_not_keep_the_next_of_its_number_from_a_record(run_dir: Path) -> None:
    (run_dir / ".r.0.rank").write_bytes(b"half")
    RankWriter().publish(run_dir, "r.0", INFO)
    assert [path.name for path in run_dir.iterdir()] == ["r.0.rank"]


def test_a_new_info_does_not_touch_the_old_one_before_it_is_whole(run_dir: Path) -> None:
    writer = RankWriter()
    writer.publish(run_dir, "r.0", INFO)
    assert writer.path is not None
    for number in range(20):
        before = writer.slots[INDEX["info_place"]]
        content = writer.path.read_bytes()
        writer.write_info({**INFO, "groups": [str(number), "x" * 100 * number]})
        assert read_rank(writer.path).info["groups"][0] == str(number)
        offset, length = map(int, divmod(before, layout.INFO_OFFSET_UNIT))
        old = slice(layout.INFO_OFFSET + offset, layout.INFO_OFFSET + offset + length)
        assert writer.path.read_bytes()[old] == content[old]
