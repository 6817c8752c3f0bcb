"""A clock that is set while it is being read."""

from __future__ import annotations

from validation.soak.exporter import skewed


def test_the_clock_is_off_by_the_number_in_the_file(tmp_path):
    file = tmp_path / "clock"
    clock = skewed(lambda: 1000.0, file)
    file.write_text("+0")
    assert clock() == 1000.0
    file.write_text("-90")
    assert clock() == 910.0
