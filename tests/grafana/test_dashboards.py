"""The committed dashboards are complete and query only existing metrics. The end-to-end test checks real data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from rankscope_dashboards.by_rank import POINTS
from rankscope_dashboards.findings import ALERT_TEXTS, FIRST_STEPS, OF_FINDINGS
from rankscope_dashboards.links import NODE_UID, RANK_ZERO, RULES, RUN_UID, RUNBOOK_OF_KIND, RUNBOOKS
from rankscope_dashboards.panels import NORMAL, REST, REST_LEAST
from rankscope_dashboards.queries import DASHBOARDS, NEEDS_CUDA, PanelQuery, panel_queries
from rankscope_dashboards.selectors import NAMED_RANKS
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.diagnosis.words import WORDS
from rankscope_exporter.report.colors import CAUTION, GOOD, NEUTRAL, RANK_COLORS

ROOT = Path(__file__).parents[2]
RATE_INTERVAL = "61s"  # unlike any duration in the dashboards' source
QUERIES = list(
    panel_queries(
        run="a-run", owner="1000", compare="another-run", instance="node:10417", interval=RATE_INTERVAL, price="2.5"
    )
)


def all_panels(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel and row of a dashboard, including panels of collapsed rows."""
    for panel in model["panels"]:
        yield panel
        yield from panel.get("panels") or ()


FILES = sorted((ROOT / "grafana/dashboards").glob("*.json"))
MODELS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
PANELS = [(name, panel) for name, model in MODELS.items() for panel in all_panels(model) if panel["type"] != "row"]
TILES = [(name, panel) for name, panel in PANELS if panel["type"] == "stat"]
BUILT_IN_SERIES = {"up", "ALERTS", "ALERTS_FOR_STATE"}

each_dashboard = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def failing(holds: Callable[[PanelQuery], object], *dashboards: str) -> list[str]:
    """Return the queries, of these dashboards or of all, for which a condition does not hold."""
    return [f"{one.panel}: {one.expr}" for one in QUERIES if one.dashboard in (dashboards or MODELS) and not holds(one)]


@cache
def nodes(expr: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expr), found.append)
    return found


def selectors(expr: str) -> Iterator[Any]:
    for node in nodes(expr):
        if isinstance(node, promql_parser.MatrixSelector):
            yield node.vector_selector
        elif isinstance(node, promql_parser.VectorSelector):
            yield node


def documented_labels() -> dict[str, set[str]]:
    """Return the labels of every metric in docs/metrics.md; histograms by the names of their series."""
    labels: dict[str, set[str]] = {}
    of_run = {"run", "owner"}
    common = {"gpu": {"gpu", "uuid"}, "rank": {*of_run, "rank"}, "exporter": set()}
    common |= dict.fromkeys(("run", "finding", "analyzer"), of_run)
    common["network"] = {"port"}
    for line in (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(
            r"\| `(rankscope_(gpu|rank|run|finding|network|exporter|analyzer)_\w+)` \| (\w+) \|[^|]*\|([^|]*)\|", line
        ):
            name, level, kind, more = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            labels |= {name + suffix: common[level] | set(re.findall(r"`(\w+)`", more)) for suffix in suffixes}
    return labels


def test_every_expression_is_valid() -> None:
    # A digit is a group of a regular expression, which Grafana leaves unchanged.
    assert not failing(lambda query: not re.search(r"\$(?!\d)", query.expr)), "a variable was not replaced"
    for query in QUERIES:
        promql_parser.parse(query.expr)


@pytest.mark.parametrize(
    ("dashboard", "allowed"),
    [("run", [("run", "a-run"), ("run", "another-run")]), ("node", [("instance", "node:10417")])],
)
def test_every_query_selects_one_run_or_one_exporter(dashboard: str, allowed: list[tuple[str, str]]) -> None:
    def is_scoped(query: PanelQuery) -> bool:
        matchers = [{(label.name, label.value) for label in one.matchers.matchers} for one in selectors(query.expr)]
        scoped = [bool(labels & {*allowed}) for labels in matchers]
        is_joined = " on (" in query.expr  # then one side is enough
        return all(scoped) or (is_joined and any(scoped))

    assert failing(is_scoped, dashboard) == []


def test_no_query_depends_on_the_name_of_the_prometheus_job() -> None:
    assert (
        failing(
            lambda query: "job" not in {label.name for one in selectors(query.expr) for label in one.matchers.matchers}
        )
        == []
    )


def test_every_age_is_by_the_exporters_clock() -> None:
    """Check ages that are computed from exporters' timestamps: their clocks may be wrong."""

    def has_right_age(query: PanelQuery) -> bool:
        names = [selector.name for selector in selectors(query.expr)]
        is_age = "time() -" in query.expr and any(name.endswith("_timestamp_seconds") for name in names)
        return not is_age or "rankscope_exporter_time_seconds" in names

    assert failing(has_right_age) == []


def test_every_rate_uses_grafanas_rate_interval() -> None:
    rates = {"rate", "irate", "increase", "delta", "deriv"}
    calls = [node for query in QUERIES for node in nodes(query.expr) if isinstance(node, promql_parser.Call)]
    ranges = {str(call): call.args[0].range for call in calls if call.func.name in rates}
    assert len(ranges) > 20
    assert {text for text, found in ranges.items() if found != promql_parser.parse_duration(RATE_INTERVAL)} == set()


def test_every_query_uses_existing_metrics_and_labels() -> None:
    documented = documented_labels() | dict.fromkeys(BUILT_IN_SERIES)

    def exists(query: PanelQuery) -> bool:
        found = [(one.name, {matcher.name for matcher in one.matchers.matchers}) for one in selectors(query.expr)]
        known = [(labels, documented[name]) for name, labels in found]
        return all(allowed is None or labels <= allowed | {"job", "instance"} for labels, allowed in known)

    assert failing(exists) == []


@each_dashboard
def test_no_panel_variable_or_annotation_reads_a_recorded_series(model: dict[str, Any]) -> None:
    found = [*texts(model, "expr"), *texts(model, "query"), *texts(model, "definition")]
    assert len(found) > 20
    assert [text for text in found if re.search(r"(?<![$\w])[a-zA-Z_]\w*:\w", text)] == []


def texts(model: Any, key: str) -> Iterator[str]:
    """Yield all texts with this key, at any depth."""
    children = model.items() if isinstance(model, dict) else enumerate(model) if isinstance(model, list) else ()
    for name, child in children:
        if name == key and isinstance(child, str):
            yield child
        yield from texts(child, key)


def test_every_metric_that_needs_cuda_has_a_panel() -> None:
    queried = {selector.name for query in QUERIES if query.needs_cuda for selector in selectors(query.expr)}
    assert queried == set(NEEDS_CUDA)


def test_every_graph_by_rank_of_a_run_is_limited() -> None:
    """Check that a run of 1,024 ranks can be drawn: a few ranks by name, and the others as a band."""
    by_rank = [panel for name, panel in PANELS if name == "run" and "rank {{rank}}" in json.dumps(panel)]
    assert len(by_rank) > 5
    for panel in by_rank:
        named, *limits = panel["targets"]
        assert re.search(rf" and on \(rank\) (topk|bottomk)\({NAMED_RANKS},", named["expr"]), panel["title"]
        assert [target["legendFormat"] for target in limits] == [REST, REST_LEAST]
        assert all(" unless on (rank) " in target["expr"] for target in limits), panel["title"]
        assert str(NAMED_RANKS) in panel["description"]
        assert panel["maxDataPoints"] == POINTS


def test_every_table_of_ranks_of_a_run_is_limited() -> None:
    tables = [panel for name, panel in PANELS if name == "run" and panel["type"] in {"table", "barchart"}]
    for panel in tables:
        if any("by (rank" in target["expr"] for target in panel["targets"]) and "rank" in columns(panel):
            assert all(re.search(r"(topk|bottomk)\(", target["expr"]) for target in panel["targets"]), panel["title"]


def columns(panel: dict[str, Any]) -> list[str]:
    """Return the labels and values that a table shows."""
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    return list(steps["organize"]["indexByName"]) if "organize" in steps else []


def test_every_panel_has_title_description_and_unit() -> None:
    for _, panel in PANELS:
        assert panel["title"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


def test_every_empty_panel_shows_a_reason() -> None:
    for _, panel in PANELS:
        reason = panel["fieldConfig"]["defaults"].get("noValue")
        assert reason, panel["title"]
        assert panel["type"] in {"stat", "table"} or reason != "-", panel["title"]


def test_a_tile_without_data_is_gray() -> None:
    for _, panel in TILES:
        base = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]
        assert base.get("value") is None, panel["title"]
        assert base["color"] in {NEUTRAL, "text"}, panel["title"]


def test_a_tile_shows_the_current_value_and_not_the_last_one() -> None:
    for _, panel in TILES:
        assert all(target["instant"] and not target["range"] for target in panel["targets"]), panel["title"]


def test_no_tile_is_green() -> None:
    """Check that no tile suggests health: the GPUs of an exporter that is up may be faulty."""
    for _, panel in TILES:
        assert GOOD not in json.dumps(panel), panel["title"]


def test_a_throttled_gpu_and_an_xid_error_are_colored() -> None:
    steps = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for name, panel in TILES
        if name == "node"
    }
    assert steps["Throttled, and why"][-1] == {"value": Thresholds().throttled, "color": CAUTION}
    assert steps["XID and ECC errors"][-1] == {"value": 1, "color": CAUTION}


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "barchart"], ids=lambda p: str(p["title"])
)
def test_every_bar_has_its_name_below(panel: dict[str, Any]) -> None:
    (matrix,) = (step["options"] for step in panel["transformations"])
    # Grafana's name of the field. Without its own unit it would be shown as a percentage.
    names = f"{matrix['rowField']}\\{matrix['columnField']}"
    assert {"id": "unit", "value": "string"} in properties(panel, names)
    assert panel["options"]["xTickLabelMaxLength"] >= len("rank 1023")


@pytest.mark.parametrize(("title", "kind"), [("Lag by rank", "rank"), ("Temperature", "GPU")])
def test_a_rank_has_the_color_of_its_last_digit(title: str, kind: str) -> None:
    (panel,) = (panel for _, panel in PANELS if panel["title"] == title)
    for number in (0, 7, 12, 1023):
        assert color_of(panel, f"{kind} {number}") == RANK_COLORS[number % 10]


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "timeseries"], ids=lambda p: p["title"]
)
def test_no_color_depends_on_a_name(panel: dict[str, Any]) -> None:
    """Check the palette: Grafana's palette by name may give two series similar colors."""
    assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "palette-classic"


def properties(panel: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the overridden properties of a field, matched as Grafana does: the last one wins."""
    return [
        one
        for override in panel["fieldConfig"]["overrides"]
        if matches(override["matcher"], name)
        for one in override["properties"]
    ]


def matches(matcher: dict[str, Any], name: str) -> bool:
    if matcher["id"] == "byRegexp":
        return re.search(matcher["options"].strip("/"), name) is not None
    return bool(matcher["options"] == name)


def color_of(panel: dict[str, Any], name: str) -> str:
    colors = [one["value"]["fixedColor"] for one in properties(panel, name) if one["id"] == "color"]
    return str(colors[-1])


def test_every_panel_queries_the_chosen_prometheus() -> None:
    for _, panel in PANELS:
        chosen = {"type": "prometheus", "uid": "${datasource}"}
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [chosen] * (
            1 + len(panel["targets"])
        )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_panel_that_needs_a_fault_explains_why_it_is_empty(name: str) -> None:
    for panel in (panel for row in DASHBOARDS[name].rows for panel in row.panels):
        if panel.kind in {"stat", "table"} and all(query.needs_fault for query in panel.queries):
            assert panel.fields.no_value not in {None, "", "-"}, panel.title


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "table"], ids=lambda p: str(p["title"])
)
def test_every_column_of_a_table_is_in_a_query(panel: dict[str, Any]) -> None:
    values = [f"Value #{target['refId']}" for target in panel["targets"]] if len(panel["targets"]) > 1 else ["Value"]
    expressions = " ".join(target["expr"] for target in panel["targets"])
    groups = re.findall(r"(?:by|group_left) \(([^)]*)\)", expressions)
    labels = {label for group in groups for label in group.split(", ")} | set(re.findall(r'"(\w+)"', expressions))
    for column in columns(panel):
        assert column in values or column in labels, column


def test_the_link_to_a_trackers_page_is_not_encoded_again() -> None:
    (panel,) = (panel for _, panel in PANELS if panel["title"] == "Experiment trackers")
    (links,) = (one["value"] for one in properties(panel, "Page") if one["id"] == "links")
    assert [link["url"] for link in links] == ["${__value.raw:raw}"]


def links(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the links of cells and series."""
    for panel in all_panels(model):
        config = panel.get("fieldConfig") or {}
        yield from config.get("defaults", {}).get("links") or ()
        for override in config.get("overrides", ()):
            yield from (link for one in override["properties"] if one["id"] == "links" for link in one["value"])


def to_dashboards(model: Any) -> list[tuple[str, list[str]]]:
    """Return the uid and the query of each link to a dashboard."""
    urls = [link["url"].partition("?") for link in links(model) if link["url"].startswith("/d/")]
    return [(path.removeprefix("/d/"), query.split("&")) for path, _, query in urls]


@each_dashboard
def test_every_link_leads_to_a_dashboard_with_its_variables(model: dict[str, Any]) -> None:
    variables = {one["uid"]: {v["name"] for v in one["templating"]["list"]} for one in MODELS.values()}
    assert RUN_UID in {uid for uid, _ in to_dashboards(model)} <= {RUN_UID, NODE_UID}
    for uid, query in to_dashboards(model):
        given = {part.partition("=")[0].removeprefix("var-") for part in query if part.startswith("var-")}
        assert given
        assert given <= variables[uid]


@each_dashboard
def test_every_link_keeps_the_time_and_the_data_source(model: dict[str, Any]) -> None:
    for _, query in to_dashboards(model):
        assert {"${__url_time_range}", "${datasource:queryparam}"} <= set(query)


@each_dashboard
def test_a_link_uses_variables_that_exist(model: dict[str, Any]) -> None:
    names = {variable["name"] for variable in model["templating"]["list"]}
    for panel in (panel for panel in all_panels(model) if panel["type"] == "table"):
        urls = " ".join(link["url"] for link in links({"panels": [panel]}))
        assert set(re.findall(r"\$\{(\w+)(?::\w+)?\}", urls)) - {"__url_time_range"} <= names


@pytest.mark.parametrize("name", ["run", "node"])
def test_findings_and_alerts_lead_to_a_runbook(name: str) -> None:
    panel = next(panel for board, panel in PANELS if (board, panel["title"]) == (name, "Findings and alerts"))
    (link,) = next(one["value"] for one in properties(panel, "First step and runbook") if one["id"] == "links")
    assert link["url"] == f"{RUNBOOKS}${{__data.fields.Runbook.text}}.md"
    mapped = next(one["value"] for one in properties(panel, "Runbook") if one["id"] == "mappings")
    shown = {kind: of["text"] for kind, of in mapped[0]["options"].items()}
    assert {*WORDS, RANK_ZERO} <= shown.keys()
    assert all((ROOT / f"docs/runbooks/{alert}.md").is_file() for alert in shown.values())


def test_a_finding_has_the_runbook_of_its_notification() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    assert {f"{RUNBOOKS}{alert}.md" for alert in RUNBOOK_OF_KIND.values()} <= set(runbooks.values())
    others = {alert for alert in runbooks if alert not in OF_FINDINGS.split("|")}
    assert others == set(ALERT_TEXTS) == set(FIRST_STEPS)


def test_critical_findings_and_alerts_are_first() -> None:
    for _, panel in PANELS:
        if panel["title"] == "Findings and alerts":
            (sorting,) = [one for one in panel["transformations"] if one["id"] == "sortBy"]
            assert sorting["options"]["sort"] == [{"field": "severity", "desc": False}]


def test_a_cell_without_a_value_is_empty() -> None:
    """Check that the sentence about an empty table is not shown in its cells."""
    for _, panel in PANELS:
        if panel["type"] == "table":
            assert {"id": "noValue", "value": ""} in properties(panel, "any column"), panel["title"]
        if panel["type"] == "state-timeline" and panel["fieldConfig"]["defaults"].get("mappings"):
            gap = {"match": "null", "result": {"text": "no data", "color": NORMAL}}
            mappings = panel["fieldConfig"]["defaults"]["mappings"]
            assert {"type": "special", "options": gap} in mappings, panel["title"]


def test_counts_are_whole_and_ratios_end_at_100_percent() -> None:
    for _, panel in PANELS:
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "timeseries" and defaults["unit"] == "none":
            assert defaults["decimals"] == 0, panel["title"]
        if panel["type"] == "timeseries" and defaults["unit"] == "percentunit":
            assert defaults.get("max") == 1 or defaults["custom"]["axisSoftMax"] <= 0.1, panel["title"]
        assert defaults["unit"] != "suffix: /s", "it would not shorten 52,000 to 52 k"


def test_marks_have_toggles() -> None:
    marks = [mark for model in MODELS.values() for mark in model["annotations"]["list"]]
    assert {"Alerts", "Starts and ends", "Checkpoints"} == {mark["name"] for mark in marks}
    assert not any(mark.get("hide") for mark in marks)


@each_dashboard
def test_ids_are_unique(model: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in all_panels(model)]
    assert len(ids) == len(set(ids))
    assert 0 < len(model["uid"]) <= 40  # Grafana rejects longer ones


@each_dashboard
def test_panels_fit_on_the_grid_without_overlap(model: dict[str, Any]) -> None:
    for panels in (model["panels"], *(panel.get("panels") or () for panel in model["panels"])):
        positions = [(panel["title"], panel["gridPos"]) for panel in panels]
        for title, position in positions:
            assert position["x"] + position["w"] <= 24, title
        for (one, a), (other, b) in combinations(positions, 2):
            has_columns_apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            has_rows_apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert has_columns_apart or has_rows_apart, f"{one} overlaps {other}"


@each_dashboard
def test_only_collapsed_rows_contain_panels(model: dict[str, Any]) -> None:
    for row in (panel for panel in model["panels"] if panel["type"] == "row"):
        assert bool(row["collapsed"]) == bool(row["panels"]), row["title"]
        assert all(panel["gridPos"]["y"] > row["gridPos"]["y"] for panel in row["panels"])


@each_dashboard
def test_every_variable_is_queried_from_prometheus(model: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in model["templating"]["list"]}
    assert variables.pop("datasource")["type"] == "datasource"
    variables.pop("compare", None)
    variables.pop("price", None)
    for name, variable in variables.items():
        query = variable["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label == name
        assert label in documented_labels()[metric] | {"job", "instance"}
        assert variable["datasource"]["uid"] == "${datasource}"


def test_no_run_is_compared_with_by_default() -> None:
    (compare,) = (variable for variable in MODELS["run"]["templating"]["list"] if variable["name"] == "compare")
    query = re.fullmatch(r"query_result\((.*)\)", compare["query"]["query"]).group(1)
    promql_parser.parse(query.replace("$run", "a-run").replace("$__range", "1h"))
    assert f'"{compare["current"]["value"]}"' in query
    pattern = re.compile(compare["regex"].strip("/"))
    # Grafana's format of a series from query_result, to which it applies the pattern.
    assert pattern.search('{run="a run, with {signs}"} 1 1761000000000').group(1) == "a run, with {signs}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run", {"datasource", "run", "compare"}),
        ("node", {"datasource", "instance"}),
        ("fleet", {"datasource", "price"}),
        ("cost", {"datasource", "price"}),
    ],
)
def test_each_dashboard_has_its_variables(name: str, expected: set[str]) -> None:
    assert expected <= {variable["name"] for variable in MODELS[name]["templating"]["list"]}
