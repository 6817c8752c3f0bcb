"""Links from cells and series to dashboards and runbooks. They keep the time range and the data source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

RUN_UID, NODE_UID = "rankscope-run", "rankscope-node"
DOCUMENTATION = "https://github.com/rankscope/rankscope/blob/main/docs/"
RUNBOOKS = f"{DOCUMENTATION}runbooks/"
RULES = Path(__file__).parents[2] / "deploy/prometheus/rules/rankscope.yml"
THIS_RUN = {"run": "${run}", "owner": "${owner}"}

Link = Any
"""A link of a cell or a series: a dict, as Grafana's JSON has it. The SDK's model is that of a dashboard's link."""


def dashboard_link(title: str, uid: str, **variables: str) -> Link:
    """Return a link to a dashboard with these values of its variables, such as `${__data.fields.Rank}`."""
    values = "".join(f"&var-{name}={value}" for name, value in variables.items())
    return {"title": title, "url": f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{values}"}


def cell(column: str) -> str:
    """Return Grafana's variable for the row's cell in the column of this title. A run's name may have an `&`."""
    return f'${{__data.fields["{column}"]:percentencode}}'


def rank_link(rank: str, run: str = THIS_RUN["run"], owner: str = THIS_RUN["owner"]) -> Link:
    """Return a link to the dashboard *Run* with the rank selected."""
    return dashboard_link(f"Show only rank {rank}", RUN_UID, run=run, owner=owner, rank=rank)


def run_link(run: str, owner: str) -> Link:
    """Return a link to the dashboard *Run* with all ranks."""
    return dashboard_link("Open the run", RUN_UID, run=run, owner=owner, rank="$__all")


def node_link(instance: str) -> Link:
    """Return a link to the dashboard *Node* of the exporter."""
    return dashboard_link("Open the node", NODE_UID, instance=instance)


def runbook_link(column: str) -> Link:
    """Return a link to the runbook that the row's cell in the column of this title names."""
    return {"title": "Open the runbook", "url": f"{RUNBOOKS}${{__data.fields.{column}.text}}.md", "targetBlank": True}


def _alerts_by_kind() -> dict[str, str]:
    rules = [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    found: dict[str, str] = {}
    for rule in rules:
        kinds = re.findall(r'rankscope_finding_ratio\{kind=~?"([\w|]+)"', rule["expr"])
        for kind in [*"|".join(kinds).split("|"), rule.get("labels", {}).get("kind", "")]:
            found.setdefault(kind, rule["alert"])
    return found


RANK_ZERO = "straggler of rank 0"
RUNBOOK_OF_KIND = {kind: alert for kind, alert in _alerts_by_kind().items() if kind} | {
    "straggler": "RankscopeRankLagging",
    RANK_ZERO: "RankscopeRankZeroLagging",
}
"""The alert, and so the runbook, of each kind of finding and of the alerts that are no finding."""

TO_RUN = run_link(cell("Run"), cell("Owner"))
TO_NODE = node_link(cell("Instance"))
TO_ADVICE = {"title": "What to do", "url": f"{DOCUMENTATION}${{__data.fields.Page.text}}.md", "targetBlank": True}
"""A link to the page of the documentation that the hidden column *Page* names."""
