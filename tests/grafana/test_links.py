"""Every link leads somewhere: the dashboard and its variables exist, and so does the page of the documentation."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import yaml
from testing import servers

from rankscope_dashboards.links import RANK_ZERO, RUNBOOK_OF_KIND

ROOT = Path(__file__).parents[2]
CAUSES_FILE = ROOT / "exporter/rankscope_exporter/diagnosis/causes.yml"
MODELS = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))]
BY_UID = {model["uid"]: model for model in MODELS}
Link = tuple[str, dict[str, Any], str, str]
"""The title of the dashboard, the panel, the column and the URL."""


def panels(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in model["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def links() -> Iterator[Link]:
    """Yield each link of a table."""
    for model in MODELS:
        for panel in panels(model):
            for override in panel.get("fieldConfig", {}).get("overrides", ()):
                for one in override["properties"]:
                    if one["id"] == "links":
                        yield from (
                            (model["title"], panel, override["matcher"]["options"], link["url"])
                            for link in one["value"]
                        )


LINKS = [link for link in links() if not link[3].startswith("${__value")]  # the page of an experiment tracker


def columns(panel: dict[str, Any]) -> set[str]:
    organize = next(step["options"] for step in panel["transformations"] if step["id"] == "organize")
    return set(organize["renameByName"].values())


def test_a_link_reads_columns_of_its_table() -> None:
    for title, panel, column, url in LINKS:
        read = {one or other for one, other in re.findall(r'__data\.fields(?:\.(\w+)|\["([^"]+))', url)}
        assert {column, *read} <= columns(panel), (title, panel["title"])


RUNBOOK = "${__data.fields.Runbook.text}.md"


def test_each_dashboard_leads_to_runs_nodes_and_runbooks() -> None:
    targets = {(title, urlsplit(url).path.split("/")[-1]) for title, _, _, url in LINKS}
    assert targets == {
        ("Fleet", "rankscope-run"),
        ("Fleet", "rankscope-node"),
        ("Fleet", "${__data.fields.Page.text}.md"),
        ("Cost", "rankscope-run"),
        *((title, to) for title in ("Run", "Node") for to in ("rankscope-run", "rankscope-node", RUNBOOK)),
    }


def test_all_dashboards_lead_to_each_other_with_their_variables_and_time() -> None:
    assert {model["title"] for model in MODELS} == {"Fleet", "Cost", "Run", "Node"}
    for model in MODELS:
        (link,) = model["links"]
        assert set(link["tags"]) <= set(model["tags"])
        assert link["type"] == "dashboards"
        assert link["keepTime"]
        assert link["includeVars"]


def pages() -> list[dict[str, Any]]:
    """Return the mappings of a finding to its page, as Grafana applies them: the first that matches."""
    (fleet,) = (model for model in MODELS if model["title"] == "Fleet")
    (found,) = (
        one["value"]
        for panel in panels(fleet)
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for one in override["properties"]
        if override["matcher"]["options"] == "Page" and one["id"] == "mappings"
    )
    return [mapping["options"] for mapping in found]


def page_of(text: str) -> str:
    mappings = (one for one in pages() if re.search(one["pattern"].strip("/"), text))
    return str(next((one["result"]["text"] for one in mappings), text))


RULES = (ROOT / "deploy/prometheus/rules/rankscope.yml").read_text(encoding="utf-8")


def alerts(rules: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]


def with_address(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the alerts after the documented command."""
    documented = (ROOT / "docs/install/existing-grafana.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^sed -i '(.+)' /etc/prometheus/rules/rankscope.yml$", documented, re.M)
    path = tmp_path / "rules.yml"
    path.write_text(RULES, encoding="utf-8")
    subprocess.run(["sed", "-i", program, str(path)], check=True)
    return alerts(path.read_text(encoding="utf-8"))


def test_an_alert_has_a_link_only_if_the_address_of_grafana_is_known(tmp_path: Path) -> None:
    assert not any("dashboard_url" in alert["annotations"] for alert in alerts(RULES))
    known = with_address(tmp_path)
    found = {alert["annotations"].pop("dashboard_url").partition("/d/")[0] for alert in known}
    assert found == {"https://grafana.example.com"}
    assert known == alerts(RULES)


@pytest.mark.parametrize(
    ("labels", "uid", "variables"),
    [
        ({"run": "a & b", "owner": "ml/1000", "instance": "a:1"}, "run", {"var-run": "a & b", "var-owner": "ml/1000"}),
        ({"instance": "[::1]:10417"}, "node", {"var-instance": "[::1]:10417"}),
        ({"owner": "1000"}, "fleet", {}),
    ],
)
def test_an_alert_links_to_the_page_of_its_run_or_node(
    labels: dict[str, str], uid: str, variables: dict[str, str], tmp_path: Path
) -> None:
    (text,) = {alert["annotations"]["dashboard_url"] for alert in with_address(tmp_path)}
    rule = {"alert": "A", "expr": "fault", "annotations": {"summary": "s", "dashboard_url": text}}
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "g", "rules": [rule]}]}))
    own = ",".join(f'{name}="{value}"' for name, value in labels.items())
    template = f"https://grafana.example.com/d/rankscope-{uid}"
    query = "?" + urlencode(variables) if variables else ""
    expected = {"exp_labels": labels, "exp_annotations": {"summary": "s", "dashboard_url": template + query}}
    test = {
        "input_series": [{"series": f"fault{{{own}}}", "values": "1 1"}],
        "alert_rule_test": [{"alertname": "A", "eval_time": "1m", "exp_alerts": [expected]}],
    }
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    command = [servers.program("promtool"), "test", "rules", str(tmp_path / "test.yml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert set(variables) <= {f"var-{one['name']}" for one in BY_UID[f"rankscope-{uid}"]["templating"]["list"]}


KINDS = sorted(set(re.findall(r"^ +finding: (\w+)$", CAUSES_FILE.read_text(encoding="utf-8"), re.M)))


def test_each_finding_leads_to_the_runbook_of_its_alert() -> None:
    rules = alerts(RULES)
    for kind in KINDS:
        for rank in ("", "2", "0-3", "12 ranks"):
            page = page_of(f"{kind} {rank}".strip())
            assert (ROOT / f"docs/{page}.md").is_file()
            (rule,) = (one for one in rules if one["annotations"]["runbook_url"].endswith(f"docs/{page}.md"))
            kinds = re.findall(r'kind=~?"([^"]+)"', rule["expr"])
            assert kind in {name for names in kinds for name in names.split("|")}


def test_rank_zero_as_a_straggler_has_a_runbook_of_its_own() -> None:
    assert page_of("straggler 0") == "runbooks/RankscopeRankZeroLagging"
    assert page_of("straggler 0,4") == "runbooks/RankscopeRankLagging"
    assert page_of("rotating_straggler") == "runbooks/RankscopeRotatingStraggler"


def test_each_kind_of_finding_has_a_runbook() -> None:
    assert RUNBOOK_OF_KIND.keys() - {RANK_ZERO} >= set(KINDS)


def test_each_page_that_a_query_names_exists() -> None:
    (fleet,) = (model for model in MODELS if model["title"] == "Fleet")
    named = re.findall(r'\\"page\\", \\"([\w/]+)\\"', json.dumps(fleet))
    assert len(set(named)) >= 4
    for page in named:
        assert (ROOT / f"docs/{page}.md").is_file(), page
