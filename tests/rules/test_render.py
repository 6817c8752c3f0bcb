"""render.py: what it fills in, and its one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import packaged_texts, render
from deploy.prometheus.thresholds import SPEEDS, RenderError, Speed, Thresholds

REASON = {"reason": "for the test"}
LIMIT: dict[str, Any] = {"limit": {"value": "5m", **REASON}}
AT_15S, AT_5S, FAST = SPEEDS


CAUSES: dict[str, Any] = {
    "lost": {"copies": {"meaning": "copying", "in_short": "to the GPU"}},
    "alerts": {
        "RankscopeSome": {
            "finding": "some",
            "share": "value",
            "summary": "Run {run} is slow",
            "advice": "Look.",
            "causes": {
                "forward|backward": {"words": "slow {cause}", "advice": "Work less on {node}."},
                "link": {"words": "{link}", "ports": {"port_drops": "drops {ratio}"}, "summary": "A link of {run}"},
            },
            "otherwise": "phase {cause}",
        }
    },
}


def values(named: dict[str, Any], speed: Speed = AT_15S, *tiers: dict[str, Any]) -> render.Values:
    return render.Values(Thresholds(named, tiers), CAUSES["alerts"], speed)


def tree(root: Path, source: str, thresholds: dict[str, Any] = LIMIT) -> Path:
    (root / "rules/alerts").mkdir(parents=True)
    (root / "rules/alerts/some.yml").write_text(source)
    (root / "thresholds.yml").write_text(yaml.safe_dump(thresholds))
    (root / "causes.yml").write_text(yaml.safe_dump(CAUSES))
    return root


def test_a_threshold_is_filled_in_unchanged_or_in_another_form() -> None:
    named = {**LIMIT, "ratio": {"value": 0.15, "fast": 0.2, "why_fast": "noise", **REASON}}
    source = "for: <<limit>>, over <<limit | seconds>> or <<limit | readable>>, above <<ratio>> or <<ratio | percent>>"
    assert render.render(source, values(named), "x") == "for: 5m, over 300 or 5 min, above 0.15 or 15%\n"
    assert render.render(source, values(named, FAST), "x") == "for: 5m, over 300 or 5 min, above 0.2 or 20%\n"


@pytest.mark.parametrize(
    ("threshold", "at_15s", "at_5s", "fast"),
    [
        ({"scrapes": 4}, "1m", "20s", "4s"),
        ({"scrapes": 4, "at_least": "8s"}, "1m", "20s", "8s"),
        ({"evaluations": 4, "at_least": "2s"}, "46s", "16s", "4s"),
        ({"scrapes": 240}, "1h", "20m", "4m"),
    ],
)
def test_a_duration_follows_the_scrape_interval(threshold: dict[str, Any], at_15s: str, at_5s: str, fast: str) -> None:
    rendered = [render.render("<<span>>", values({"span": threshold}, speed), "x") for speed in SPEEDS]
    assert rendered == [f"{at_15s}\n", f"{at_5s}\n", f"{fast}\n"]


@pytest.mark.parametrize(("speed", "interval"), [(AT_15S, "15s"), (Speed("any", 60), "1m")])
def test_the_group_is_evaluated_at_its_interval(tmp_path: Path, speed: Speed, interval: str) -> None:
    root = tree(tmp_path, "- alert: RankscopeSome\n  for: <<limit>>\n  expr: <<interval | seconds>>\n")
    (group,) = yaml.safe_load(render.group(speed, root))["groups"]
    assert group["interval"] == interval
    assert group["rules"][0]["expr"] == speed.interval


def test_lines_for_each_tier_are_repeated_with_its_fields() -> None:
    tiers = ({"span": {"evaluations": 4, "at_least": "8s"}}, {"span": {"evaluations": 60, "at_least": "8s"}})
    source = "first\n# <<for each tier>>\n- <<tier>>: <<tier_span>>\n# <<end>>\nlast of <<first_tier_span>>"
    assert render.render(source, values({}, AT_15S, *tiers), "x") == "first\n- 1: 46s\n- 2: 886s\nlast of 46s\n"


def test_phases_are_those_of_the_hook() -> None:
    assert render.render("a: <<planned_phases>>", values({}), "x") == "a: startup|checkpoint|evaluation\n"
    assert render.render("a: <<computing_phases>>", values({}), "x") == "a: forward|backward|optimizer\n"


def test_an_alert_gets_its_texts_and_its_runbook() -> None:
    texts = (
        "<<summary>>:\n      <<cause_words>>\n    description: >-\n      Text.\n      <<cause_advice>> <<summary_link>>"
    )
    source = f"- alert: RankscopeSome\n  annotations:\n    summary: >-\n      {texts}\n"
    (rule,) = yaml.safe_load(render.render(source, values({}), "x"))
    assert rule["annotations"]["runbook_url"].endswith("/docs/runbooks/RankscopeSome.md")
    first, link = rule["annotations"]["summary"].split('{{- else if match "^(link)$" $labels.cause }}')
    assert first == (
        'Run {{ $labels.run }} is slow: {{ if match "^(forward|backward)$" $labels.cause }}slow {{ $labels.cause }} '
    )
    assert link.startswith("{{ if $labels.port }}port {{ $labels.port }} of {{ $labels.node }} {{ with printf `max")
    assert link.endswith("is slow{{ end }} {{- else }}phase {{ $labels.cause }} {{- end }}")
    assert rule["annotations"]["description"] == (
        'Text. {{- if match "^(forward|backward)$" $labels.cause }} Work less on {{ or $labels.node "its node" }}. '
        "{{- else }} Look. {{- end }} A link of {{ $labels.run }}"
    )


def test_findings_get_the_texts_of_the_alert_by_cause(tmp_path: Path) -> None:
    found = json.loads(packaged_texts.words(tree(tmp_path, "")))
    assert found["ports"] == {"port_drops": "drops {ratio}"}
    assert found["kinds"]["some"] == {
        "summary": {"link": "A link of {run}", "": "Run {run} is slow"},
        "words": {"forward": "slow {cause}", "backward": "slow {cause}", "link": "{link}", "": "phase {cause}"},
        "advice": dict.fromkeys(("forward", "backward"), "Work less on {node}.") | {"": "Look."},
    }


def test_an_unknown_field_of_a_text_is_named() -> None:
    unknown = render.Values(Thresholds({}), {"RankscopeSome": {"summary": "{nothing}"}}, AT_15S)
    with pytest.raises(RenderError, match=r"^x:2: causes.yml: unknown field {nothing} in summary$"):
        render.render("- alert: RankscopeSome\n<<summary>>", unknown, "x")


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


def test_explain_gets_facts_from_causes_thresholds_and_alertmanager(tmp_path: Path) -> None:
    alertmanager = tmp_path / "alertmanager.yml"
    rule = {"source_matchers": ['alertname="A"'], "target_matchers": ['alertname=~"B|C"'], "equal": ["run"]}
    of_returns = {**rule, "source_matchers": ['alertname="RankscopeFlapping"', 'alert="A"']}
    alertmanager.write_text(yaml.safe_dump({"inhibit_rules": [rule, of_returns]}))
    tier = {"limit": {"value": 0.1, "fast": 0.2}, "span": {"evaluations": 8, "at_least": "9s"}}
    thresholds = {"tiers": {"rows": [tier]}, "min_steps_to_alert": {"value": 12}}
    facts = json.loads(packaged_texts.known(tree(tmp_path, "", thresholds), alertmanager))
    assert facts["meanings"] == {"copies": "to the GPU"}
    assert facts["shares"] == {"RankscopeSome": "value"}
    assert (facts["tiers"], facts["min_steps_to_alert"]) == ([{"limit": 0.1, "evaluations": 8, "at_least": 9}], 12)
    assert facts["inhibit_rules"] == [
        {"source": [["alertname", "=", "A"]], "target": [["alertname", "=~", "B|C"]], "equal": ["run"]}
    ]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\nfor: <<limits>>", "some.yml:2: unknown threshold <<limits>>"),
        ("for: <<limit | hours>>", "some.yml:1: unknown form <<limit | hours>>"),
        ("# <<for each tier>>\n# <<end>>\nfor: <<tier_span>>", "some.yml:3: unknown threshold <<tier_span>>"),
        ("for: <<limit | percent>>", "some.yml:1: <<limit | percent>>: could not convert string to float: '5m'"),
        ("for: 5m", "thresholds.yml: no rule uses limit"),
        ("- alert: Another\nfor: <<limit>>, <<cause_words>>", "some.yml:2: causes.yml has no words for this alert"),
    ],
)
def test_a_mistake_in_a_rule_is_one_line_that_names_it(tmp_path: Path, source: str, complaint: str) -> None:
    with pytest.raises(RenderError, match=f"^{re.escape(complaint)}$"):
        render.render_all(tree(tmp_path, source))


@pytest.mark.parametrize(
    ("threshold", "has"),
    [
        ({"value": "5m"}, "value"),
        ({"value": "5m", "fast": "1s", **REASON}, "fast, reason, value"),
        ({"value": "5m", "scrapes": 3, **REASON}, "reason, scrapes, value"),
        ({"value": "5m", "at_least": "3s", **REASON}, "at_least, reason, value"),
    ],
)
def test_a_threshold_without_a_reason_or_with_two_values_is_refused(
    tmp_path: Path, threshold: dict[str, Any], has: str
) -> None:
    with pytest.raises(RenderError, match=f"thresholds.yml: limit needs value, .* it has {has}$"):
        render.render_all(tree(tmp_path, "for: <<limit>>", {"limit": threshold}))


def test_files_that_differ_are_missing_or_left_over_are_outdated(tmp_path: Path) -> None:
    rendered = render.render_all(tree(tmp_path, "for: <<limit>>"))
    render.write(rendered)
    assert not list(render.outdated(rendered))
    (tmp_path / "rules/fast.yml").write_text("edited by hand")
    (tmp_path / "rules/15s.yml").unlink()
    (tmp_path / "rules/5s.yml").write_text("edited too")
    left_over = tmp_path / "rules/30s.yml"
    left_over.write_text("its source is gone")
    assert set(render.outdated(rendered)) == {*rendered, left_over}
    render.write(rendered)
    assert not left_over.exists()
    assert not list(render.outdated(rendered))


def own(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run render.py with only PyYAML installed."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "yaml").symlink_to(Path(yaml.__file__).parent)
    run = f"import runpy, sys; sys.path.append({str(packages)!r}); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", run, render.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_operators_own_rules_need_nothing_but_pyyaml(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yml"
    mine.write_text("checkpoint_overdue: 1h\ngpu_hour_price: {value: 2.5, reason: the invoice of May}\nwindow: 2m\n")
    done = own(tmp_path, "--interval", "30s", "--thresholds", mine, "--keep", "team", "--out", tmp_path / "rules")
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "rules/30s.yml").read_text()
    (group,) = yaml.safe_load(text)["groups"]
    rules = {rule.get("record", rule.get("alert")): rule for rule in group["rules"]}
    assert group["interval"] == "30s"
    assert "> 3600" in rules["RankscopeCheckpointOverdue"]["expr"]
    assert "[2m]" in rules["rank:rankscope_steps:rate"]["expr"]
    assert "* 2.5" in rules["run:rankscope_lost_money:total"]["expr"]
    assert rules["run:rankscope_steps:rate"]["expr"] == "max by (run, owner, cluster, team) (rank:rankscope_steps:rate)"
    asked = '{run=%q,cause="straggler",owner=%q,cluster=%q,team=%q}` $labels.run $labels.owner $labels.cluster $'
    assert asked in rules["RankscopeTransferBound"]["annotations"]["description"]
    assert (
        "SUCCESS"
        in subprocess.run(
            ["promtool", "check", "rules", tmp_path / "rules/30s.yml"], capture_output=True, text=True, check=True
        ).stdout
    )


def test_the_rendered_file_is_named(tmp_path: Path) -> None:
    done = own(tmp_path, "--interval", "30s", "--out", tmp_path / "rules")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'rules/30s.yml'}\n", "")


@pytest.mark.parametrize("interval", ["2s", "2m"])
def test_an_untested_interval_is_rendered_with_a_warning(tmp_path: Path, interval: str) -> None:
    done = own(tmp_path, "--interval", interval, "--out", tmp_path / "rules")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'rules'}/{interval}.yml\n")
    assert done.stderr == f"render.py: {interval} is not tested; intervals between 5s and 1m are\n"


def test_without_pyyaml_it_says_how_to_get_it() -> None:
    command = [sys.executable, "-I", "-S", render.__file__, "--interval", "30s", "--out", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "render.py: needs PyYAML: pip install PyYAML\n"


@pytest.mark.parametrize(
    ("arguments", "mine", "complaint"),
    [
        (("--out", "x"), "checkpoint_over: 1h", "checkpoint_over is not a threshold of thresholds.yml"),
        (("--out", "x"), "checkpoint_overdue: 1", "checkpoint_overdue needs a duration such as 90s or 5m"),
        (("--out", "x"), "loss_limit: 10s", "loss_limit needs a number"),
        (("--out", "x"), "- 1h", "expected a table of thresholds such as checkpoint_overdue: 1h"),
        (("--out", "x"), "window: {at_least: 3s}", "window needs value, scrapes or evaluations"),
        (("--out", "x", "--interval", "1.5s"), "", "--interval: 1.5s is not a duration in whole seconds"),
        (("--out", "x", "--keep", "my-team"), "", "--keep: my-team is not a label name"),
        ((), "checkpoint_overdue: 1h", "your own rules need --out DIR"),
    ],
)
def test_a_mistake_in_an_operators_arguments_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], mine: str, complaint: str
) -> None:
    (tmp_path / "mine.yml").write_text(mine)
    thresholds = ("--thresholds", str(tmp_path / "mine.yml")) if mine else ()
    done = own(tmp_path, *thresholds, *(str(tmp_path / one) if one == "x" else one for one in arguments))
    assert done.returncode == 2
    assert re.fullmatch(f"render.py: .*{re.escape(complaint)}.*\n", done.stderr)
    assert not (tmp_path / "x").exists()


def test_labels_of_an_empty_join_and_of_prose_are_unchanged() -> None:
    source = "expr: a and on () vector(1) > on (run) b\nsummary: 'on {{ with printf `c{run=%q}` $labels.run | query }}'"
    assert render.render(source, values({}), "x") == (
        "expr: a and on () vector(1) > on (run, owner, cluster) b\n"
        "summary: 'on {{ with printf `c{run=%q,owner=%q,cluster=%q}` "
        "$labels.run $labels.owner $labels.cluster | query }}'\n"
    )
