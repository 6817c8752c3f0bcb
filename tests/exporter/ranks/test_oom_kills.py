"""The time of the last kill by the kernel's out-of-memory killer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_exporter.ranks.oom_kills import OomKills


def test_the_time_is_that_of_the_reading_in_which_the_count_has_risen(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    kills, times = OomKills(vmstat), []
    for at, count in enumerate([3, 3, 4, 4, 6]):
        vmstat.write_text(f"nr_free_pages 10\noom_kill {count}\nnuma_hit 7\n")
        times.append(kills.last(float(at)))
    assert times == [None, None, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "text", ["nr_free_pages 10\n", "not_oom_kill 3\noom_kill_x 4\n", "oom_kill many\n", "", None, b"\xff\xfe"]
)
def test_a_count_that_cannot_be_read_is_no_kill(tmp_path: Path, text: str | bytes | None) -> None:
    vmstat = tmp_path / "vmstat"
    kills = OomKills(vmstat)
    vmstat.write_text("oom_kill 3\n")
    assert kills.last(0.0) is None
    vmstat.unlink()
    if text is not None:
        vmstat.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert kills.last(1.0) is None
    vmstat.write_text("oom_kill 4\n")
    assert kills.last(2.0) == 2.0
