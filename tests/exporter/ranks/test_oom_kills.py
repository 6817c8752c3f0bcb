"""The kernel's count of processes that its out-of-memory killer has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_exporter.ranks.oom_kills import read_oom_kills


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("nr_free_pages 10\noom_kill 3\nnuma_hit 7\n", 3.0),
        ("nr_free_pages 10\n", None),
        ("pswpin 1\nnot_oom_kill 3\noom_kill_x 4\n", None),
        ("oom_kill many\n", None),
        ("", None),
    ],
)
def test_the_count_is_read_or_unknown(tmp_path: Path, text: str, kills: float | None) -> None:
    (tmp_path / "vmstat").write_text(text)
    assert read_oom_kills(tmp_path / "vmstat") == kills


def test_a_file_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path / "missing") is None
    (tmp_path / "vmstat").write_bytes(b"\xff\xfe")
    assert read_oom_kills(tmp_path / "vmstat") is None
