"""render.py: what it fills in, and the one line it answers to a mistake in the sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import render

LIMIT: dict[str, dict[str, Any]] = {"limit": {"production": "5m", "fast": "10s", "reason": "for the test"}}


def tree(root: Path, source: str, thresholds: dict[str, Any] = LIMIT) -> Path:
    (root / "rules/source").mkdir(parents=True)
    (root / "rules/source/some.yml").write_text(source)
    (root / "thresholds.yml").write_text(yaml.safe_dump(thresholds))
    return root


def test_a_threshold_is_filled_in_as_it_is_as_seconds_or_as_a_percentage() -> None:
    thresholds: dict[str, dict[str, Any]] = {
        **LIMIT,
        "ratio": {"production": 0.15, "fast": 0.2, "reason": "for the test"},
    }
    source = "for: <<limit>>, over <<limit | seconds>>, above <<ratio>> or <<ratio | percent>>"
    assert render.render(source, thresholds, "production", "x") == "for: 5m, over 300, above 0.15 or 15%"
    assert render.render(source, thresholds, "fast", "x") == "for: 10s, over 10, above 0.2 or 20%"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\nfor: <<limits>>", "some.yml:2: unknown threshold <<limits>>"),
        ("for: <<limit | hours>>", "some.yml:1: unknown form <<limit | hours>>"),
        ("for: <<limit | percent>>", "some.yml:1: <<limit | percent>>: could not convert string to float: '5m'"),
        ("for: 5m", "thresholds.yml: no rule uses limit"),
    ],
)
def test_a_mistake_in_a_rule_is_one_line_that_names_it(tmp_path: Path, source: str, complaint: str) -> None:
    with pytest.raises(render.RenderError, match=f"^{re.escape(complaint)}$"):
        render.render_all(tree(tmp_path, source))


def test_a_threshold_without_a_reason_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, "for: <<limit>>", {"limit": {"production": "5m", "fast": "1s"}})
    with pytest.raises(render.RenderError, match="limit needs exactly production, fast and reason"):
        render.render_all(root)


def test_what_differs_is_missing_or_left_over_is_not_up_to_date_until_written(tmp_path: Path) -> None:
    rendered = render.render_all(tree(tmp_path, "for: <<limit>>"))
    render.write(rendered)
    assert not list(render.outdated(rendered))
    (tmp_path / "rules/fast/some.yml").write_text("edited by hand")
    (tmp_path / "rules/production/some.yml").unlink()
    left_over = tmp_path / "rules/fast/gone.yml"
    left_over.write_text("its source is gone")
    assert set(render.outdated(rendered)) == {*rendered, left_over}
    render.write(rendered)
    assert not left_over.exists()
    assert not list(render.outdated(rendered))
