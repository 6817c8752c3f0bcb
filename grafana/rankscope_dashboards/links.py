"""Links from a table's cells to the other dashboards and to the runbooks, and the price of a GPU-hour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.models import dashboard as sdk

from rankscope_dashboards.panels import override

CAUSES_FILE = Path(__file__).parents[2] / "exporter/rankscope_exporter/diagnosis/causes.yml"
DOCUMENTATION = "https://github.com/rankscope/rankscope/blob/main/docs"
KEPT = "${datasource:queryparam}&${__url_time_range}"
"""What each link to a dashboard keeps: the Prometheus and the time range."""
# Percent-encoded, because a run's name may have an `&`.
OF_RUN = "var-run=${__data.fields.Run:percentencode}&var-owner=${__data.fields.Owner:percentencode}"
TO_RUN = f"/d/rankscope-run?{OF_RUN}&{KEPT}"
TO_NODE = f"/d/rankscope-node?var-instance=${{__data.fields.Instance:percentencode}}&{KEPT}"
TO_ADVICE = f"{DOCUMENTATION}/${{__data.fields.Page.text}}.md"

PRICE = sdk.VariableModel(
    type_val=sdk.VariableType.TEXTBOX,
    name="price",
    label="Price of a GPU-hour",
    description="In any currency, such as 2.5. Without a price no costs are shown.",
    query="",
    current=sdk.VariableOption(text="", value=""),
)


def priced(gpu_hours: str) -> str:
    """Return the query of the money for these GPU-hours; it has no data without a price."""
    # `+ 0`: an empty price is 0, whose scalar is not a number, and no number is compared with that.
    return f"({gpu_hours}) * scalar(vector($price + 0) > 0) >= 0"


def runbooks() -> dict[str, str]:
    """Return the runbook of each kind of finding; rank 0 as a straggler is `straggler 0`."""
    alerts = yaml.safe_load(CAUSES_FILE.read_text(encoding="utf-8"))["alerts"]
    found = {kind: name for name, texts in alerts.items() for kind in _kinds(texts)}
    return found | {"straggler": "RankscopeRankLagging", "straggler 0": "RankscopeRankZeroLagging"}


def _kinds(texts: Any) -> Iterator[str]:
    """Yield the kinds of findings that an alert has words for, at any depth."""
    for key, value in texts.items() if isinstance(texts, dict) else ():
        if key == "finding":
            yield value
        yield from _kinds(value)


def page_names(column: str) -> sdk.DashboardFieldConfigSourceOverrides:
    """Return the override that replaces a kind of finding and its rank by its runbook: the cell's text, for links."""
    names = runbooks()
    of_rank_zero = names.pop("straggler 0")
    patterns = {"/^straggler 0$/": of_rank_zero} | {rf"/^{kind}( .*)?$/": name for kind, name in names.items()}
    mappings = [
        sdk.RegexMap(
            options=sdk.DashboardRegexMapOptions(pattern, sdk.ValueMappingResult(text=f"runbooks/{name}", index=index))
        )
        for index, (pattern, name) in enumerate(patterns.items())
    ]
    return override(column, mappings=mappings)
