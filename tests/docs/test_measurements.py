"""The pages of measurements: each states its conditions and is in the table of the README, with its date and load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MEASUREMENTS = Path(__file__).parents[2] / "docs/measurements"
PAGES = sorted(MEASUREMENTS.glob("[a-z]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_states_its_conditions_as_the_table_does(page: Path) -> None:
    stated = [line.partition(": ") for line in page.read_text().splitlines()[2:6]]
    assert [name for name, _, _ in stated] == ["- command", "- date", "- machine", "- bound"]
    (row,) = re.findall(rf"^.*\]\({page.name}\) \| .*$", (MEASUREMENTS / "README.md").read_text(), re.MULTILINE)
    _, date, machine, _ = (value for _, _, value in stated)
    load = re.search(r"load [\d.]+", machine)
    assert f" | {date} | " in row
    assert row.endswith(f", {load[0]} |" if load else " |")
