"""The pages of measurements: each states its conditions and is in the table of the README."""

from __future__ import annotations

from pathlib import Path

import pytest

MEASUREMENTS = Path(__file__).parents[2] / "docs/measurements"
PAGES = sorted(MEASUREMENTS.glob("[a-z]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_states_its_conditions_and_is_in_the_table(page: Path) -> None:
    stated = [line.partition(":")[0] for line in page.read_text().splitlines()[2:6]]
    assert stated == ["- command", "- date", "- machine", "- bound"]
    assert f"]({page.name}) |" in (MEASUREMENTS / "README.md").read_text()
