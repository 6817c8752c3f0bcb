"""render.py: what it fills in, and the one line it answers to a mistake in the sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import render

LIMIT: dict[str, dict[str, Any]] = {"limit": {"production": "5m", "fast": "10s", "reason": "for the test"}}


CAUSES: dict[str, Any] = {
    "lost": {"copies": {"meaning": "copying", "in_short": "to the GPU"}},
    "alerts": {
        "RankscopeSome": {
            "share": "value",
            "causes": {
                "forward|backward": {"words": "slow work", "advice": "Work less."},
                "link": {"words": "a link"},
            },
            "otherwise": "phase {{ $labels.cause }}",
        }
    },
}


def values(thresholds: dict[str, Any], speed: str = "production") -> render.Values:
    return render.Values(thresholds, CAUSES["alerts"], speed)


def tree(root: Path, source: str, thresholds: dict[str, Any] = LIMIT) -> Path:
    (root / "rules/alerts").mkdir(parents=True)
    (root / "rules/alerts/some.yml").write_text(source)
    (root / "thresholds.yml").write_text(yaml.safe_dump(thresholds))
    (root / "causes.yml").write_text(yaml.safe_dump(CAUSES))
    return root


def test_a_threshold_is_filled_in_as_it_is_as_seconds_or_as_a_percentage() -> None:
    thresholds: dict[str, dict[str, Any]] = {
        **LIMIT,
        "ratio": {"production": 0.15, "fast": 0.2, "reason": "for the test"},
    }
    source = "for: <<limit>>, over <<limit | seconds>>, above <<ratio>> or <<ratio | percent>>"
    production, fast = values(thresholds), values(thresholds, "fast")
    assert render.render(source, production, "x") == "for: 5m, over 300, above 0.15 or 15%\n"
    assert render.render(source, fast, "x") == "for: 10s, over 10, above 0.2 or 20%\n"


def test_phases_are_those_of_the_hook() -> None:
    assert render.render("a: <<planned_phases>>", values({}), "x") == "a: startup|checkpoint|evaluation\n"
    assert render.render("a: <<computing_phases>>", values({}), "x") == "a: forward|backward|optimizer\n"


def test_an_alert_gets_the_words_and_the_advice_on_its_causes_and_its_runbook() -> None:
    source = (
        "- alert: RankscopeSome\n  annotations:\n    summary: >-\n      Slow: <<cause_words>>\n      <<cause_advice>>\n"
    )
    (rule,) = yaml.safe_load(render.render(source, values({}), "x"))
    assert rule["annotations"]["runbook_url"].endswith("/docs/runbooks/RankscopeSome.md")
    assert rule["annotations"]["summary"] == (
        'Slow: {{ if match "^(forward|backward)$" $labels.cause }}slow work ({{ $labels.cause }}) '
        '{{- else if match "^(link)$" $labels.cause }}a link ({{ $labels.cause }}) '
        "{{- else }}phase {{ $labels.cause }} {{- end }} "
        '{{- if match "^(forward|backward)$" $labels.cause }} Work less. {{- end }}'
    )


def test_all_sources_are_one_group_facts_first_and_alerts_last(tmp_path: Path) -> None:
    root = tree(tmp_path, "- alert: RankscopeSome\n  for: <<limit>>\n")
    (root / "rules/recording").mkdir()
    for name in ("20_later", "10_first"):
        (root / f"rules/recording/{name}.yml").write_text(f"# A fact.\n- record: {name}\n  expr: 1\n")
    for text in render.render_all(root).values():
        (group,) = yaml.safe_load(text)["groups"]
        assert [rule.get("record", rule.get("alert")) for rule in group["rules"]] == [
            "10_first",
            "20_later",
            "RankscopeSome",
        ]


def test_what_explain_knows_is_taken_from_the_causes_and_from_alertmanager(tmp_path: Path) -> None:
    alertmanager = tmp_path / "alertmanager.yml"
    rule = {"source_matchers": ['alertname="A"'], "target_matchers": ['alertname=~"B|C"'], "equal": ["run"]}
    alertmanager.write_text(yaml.safe_dump({"inhibit_rules": [rule]}))
    facts = json.loads(render.known(tree(tmp_path, ""), alertmanager))
    assert facts["meanings"] == {"copies": "to the GPU"}
    assert facts["shares"] == {"RankscopeSome": "value"}
    assert facts["silences"] == [
        {"source": [["alertname", "=", "A"]], "target": [["alertname", "=~", "B|C"]], "equal": ["run"]}
    ]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\nfor: <<limits>>", "some.yml:2: unknown threshold <<limits>>"),
        ("for: <<limit | hours>>", "some.yml:1: unknown form <<limit | hours>>"),
        ("for: <<limit | percent>>", "some.yml:1: <<limit | percent>>: could not convert string to float: '5m'"),
        ("for: 5m", "thresholds.yml: no rule uses limit"),
        ("- alert: Another\nfor: <<limit>>, <<cause_words>>", "some.yml:2: causes.yml has no words for this alert"),
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
    (tmp_path / "rules/fast/rankscope.yml").write_text("edited by hand")
    (tmp_path / "rules/production/rankscope.yml").unlink()
    left_over = tmp_path / "rules/fast/gone.yml"
    left_over.write_text("its source is gone")
    assert set(render.outdated(rendered)) == {*rendered, left_over}
    render.write(rendered)
    assert not left_over.exists()
    assert not list(render.outdated(rendered))
