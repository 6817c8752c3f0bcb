"""A clock that is set while somebody looks at it."""

from __future__ import annotations

from validation.soak.exporter import wrong


def test_the_clock_is_wrong_by_what_the_file_says_at_the_moment(tmp_path):
    file = tmp_path / "clock"
    clock = wrong(lambda: 1000.0, file)
    file.write_text("+0")
    assert clock() == 1000.0
    file.write_text("-90")
    assert clock() == 910.0
