"""The committed dashboards: complete, asking only for what exists. Real data is the end-to-end test's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from rankscope.record import phases
from rankscope_dashboards.panels import CAUTION, NEUTRAL
from rankscope_dashboards.phases import CAUSES, PHASES
from rankscope_dashboards.queries import DASHBOARDS, NEEDS_CUDA, PanelQuery, panel_queries

ROOT = Path(__file__).parents[2]
RATE_INTERVAL = "61s"  # a duration that nobody would write by hand
QUERIES = list(
    panel_queries(run="a-run", owner="1000", compare="another-run", instance="node:10417", interval=RATE_INTERVAL)
)


def all_panels(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel and row of a dashboard, also what collapsed rows hide."""
    for panel in model["panels"]:
        yield panel
        yield from panel.get("panels") or ()


FILES = sorted((ROOT / "grafana/dashboards").glob("*.json"))
MODELS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
PANELS = [(name, panel) for name, model in MODELS.items() for panel in all_panels(model) if panel["type"] != "row"]
TILES = [(name, panel) for name, panel in PANELS if panel["type"] == "stat"]
PROMETHEUS_OWN = {"up", "ALERTS"}

each_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dashboard}-{query.panel}")
each_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{n}-{p['title']}" for n, p in PANELS]
)
each_tile = pytest.mark.parametrize("panel", [panel for _, panel in TILES], ids=[p["title"] for _, p in TILES])
each_dashboard = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


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
    """Every metric of docs/metrics.md with its labels; a histogram by the names of its series."""
    labels: dict[str, set[str]] = {}
    of_run = {"run", "owner"}
    common = {"gpu": {"gpu", "uuid"}, "rank": {*of_run, "rank"}, "run": of_run, "finding": of_run, "exporter": set()}
    common["network"] = {"port"}
    for line in (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(
            r"\| `(rankscope_(gpu|rank|run|finding|network|exporter)_\w+)` \| (\w+) \|[^|]*\|([^|]*)\|", line
        ):
            name, level, kind, more = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            labels |= {name + suffix: common[level] | set(re.findall(r"`(\w+)`", more)) for suffix in suffixes}
    return labels


def recorded() -> set[str]:
    """The names of the recording rules that Prometheus is given."""
    return {rule["record"] for group in production_groups() for rule in group["rules"] if "record" in rule}


def production_groups() -> list[dict[str, Any]]:
    files = [ROOT / "deploy/prometheus/rules/15s.yml"]
    return [group for path in files for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]


@each_query
def test_every_expression_parses(query: PanelQuery) -> None:
    assert "$" not in query.expr, "a variable was left in place"
    promql_parser.parse(query.expr)


@each_query
def test_every_query_asks_for_one_run_or_one_exporter(query: PanelQuery) -> None:
    one_of = {
        "run": [{("run", "a-run")}, {("run", "another-run")}],
        "node": [{("instance", "node:10417")}],
    }[query.dashboard]
    asked = [{(label.name, label.value) for label in chosen.matchers.matchers} for chosen in selectors(query.expr)]
    scoped = [any(wanted <= labels for wanted in one_of) for labels in asked]
    joined = " on (" in query.expr  # then what it is joined with need not be asked for by name
    assert all(scoped) or (joined and any(scoped))


@each_query
def test_no_query_depends_on_the_name_of_the_prometheus_job(query: PanelQuery) -> None:
    asked = [label.name for chosen in selectors(query.expr) for label in chosen.matchers.matchers]
    assert "job" not in asked


@each_query
def test_every_age_is_by_prometheus_clock(query: PanelQuery) -> None:
    """What an exporter says of times is by its own clock, which may be wrong."""
    names = [selector.name for selector in selectors(query.expr)]
    if "time() -" in query.expr and any(name.endswith("_timestamp_seconds") for name in names):
        assert "exporter:rankscope_clock_ahead:seconds" in names


@each_query
def test_every_rate_is_over_grafanas_rate_interval(query: PanelQuery) -> None:
    for node in nodes(query.expr):
        if isinstance(node, promql_parser.Call) and node.func.name in {"rate", "irate", "increase", "delta", "deriv"}:
            assert node.args[0].range == promql_parser.parse_duration(RATE_INTERVAL), node


@each_query
def test_every_query_asks_for_metrics_and_labels_that_exist(query: PanelQuery) -> None:
    documented = documented_labels()
    for selector in selectors(query.expr):
        if ":" in selector.name:
            assert selector.name in recorded()
        elif selector.name not in PROMETHEUS_OWN:
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= documented[selector.name] | {"job", "instance"}


def test_what_needs_cuda_is_asked_for_by_a_panel() -> None:
    asked = {selector.name for query in QUERIES if query.needs_cuda for selector in selectors(query.expr)}
    assert asked == set(NEEDS_CUDA)


def test_every_phase_and_every_cause_has_a_color() -> None:
    causes = {
        rule["labels"]["cause"]
        for group in production_groups()
        for rule in group["rules"]
        if rule.get("record") == "run:rankscope_lost:ratio" and "cause" in rule.get("labels", {})
    }
    assert tuple(PHASES) == phases.NAMES
    assert {"launch", "device_read", *causes, *phases.NAMES} <= CAUSES.keys()


@each_panel
def test_every_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]


@each_panel
def test_every_panel_says_why_it_is_empty(panel: dict[str, Any]) -> None:
    reason = panel["fieldConfig"]["defaults"].get("noValue")
    assert reason
    assert panel["type"] in {"stat", "table"} or reason != "-"


@each_tile
def test_a_tile_without_a_value_has_no_color_but_grey(panel: dict[str, Any]) -> None:
    base = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]
    assert base.get("value") is None
    assert base["color"] in {NEUTRAL, "text"}


@each_tile
def test_a_tile_shows_what_is_now_and_not_what_was_last(panel: dict[str, Any]) -> None:
    assert all(target["instant"] and not target["range"] for target in panel["targets"])


@each_tile
def test_no_tile_is_green(panel: dict[str, Any]) -> None:
    """An exporter that is up says nothing about its GPUs, nor a rank that lives about its run."""
    assert "green" not in json.dumps(panel)


def test_a_throttled_gpu_and_an_xid_are_seen_at_a_glance() -> None:
    steps = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for name, panel in TILES
        if name == "node"
    }
    limit = yaml.safe_load((ROOT / "deploy/prometheus/thresholds.yml").read_text())["throttled_share"]["value"]
    assert steps["Throttled"][-1] == {"value": limit, "color": CAUTION}
    assert steps["XID errors"][-1] == {"value": 1, "color": CAUTION}


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "barchart"], ids=lambda p: str(p["title"])
)
def test_every_bar_has_its_name_below(panel: dict[str, Any]) -> None:
    (matrix,) = (step["options"] for step in panel["transformations"])
    # As Grafana calls the field of the names; one without a unit of its own would be a share like the bars.
    names = f"{matrix['rowField']}\\{matrix['columnField']}"
    assert {"id": "unit", "value": "string"} in properties(panel, names)
    assert panel["options"]["xTickLabelMaxLength"] >= len("rank 1023")


@pytest.mark.parametrize(("title", "kind"), [("Lag by rank", "rank"), ("Temperature", "GPU")])
def test_any_ten_ranks_in_a_row_have_colors_that_can_be_told_apart(title: str, kind: str) -> None:
    (panel,) = (panel for _, panel in PANELS if panel["title"] == title)
    colors = [color_of(panel, f"{kind} {number}") for number in range(1030)]
    for first in range(1020):
        for one, other in combinations(colors[first : first + 10], 2):
            assert distance(one, other) > 50


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "timeseries"], ids=lambda p: p["title"]
)
def test_no_color_is_by_a_name(panel: dict[str, Any]) -> None:
    """Names may be alike in Grafana's palette."""
    assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "palette-classic"


def properties(panel: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What the overrides say about a field, as Grafana matches them: the last one wins."""
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


def distance(one: str, other: str) -> float:
    """Of two colors, such as #ff0000, in RGB's cube."""
    return math.dist(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]))


@each_panel
def test_every_panel_asks_the_chosen_prometheus(panel: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [chosen] * (
        1 + len(panel["targets"])
    )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_panel_that_only_a_fault_fills_says_so_while_it_is_empty(name: str) -> None:
    for panel in (panel for row in DASHBOARDS[name].rows for panel in row.panels):
        if panel.kind in {"stat", "table"} and all(query.needs_fault for query in panel.queries):
            assert panel.fields.no_value not in {None, "", "-"}, panel.title


@pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS if panel["type"] == "table"], ids=lambda p: str(p["title"])
)
def test_every_column_of_a_table_is_in_an_answer(panel: dict[str, Any]) -> None:
    arranged = next(step["options"] for step in panel["transformations"] if step["id"] == "organize")
    values = [f"Value #{target['refId']}" for target in panel["targets"]] if len(panel["targets"]) > 1 else ["Value"]
    expressions = " ".join(target["expr"] for target in panel["targets"])
    labels = {label for group in re.findall(r"by \(([^)]*)\)", expressions) for label in group.split(", ")}
    for column in arranged["indexByName"]:
        assert column in values or column in labels or expressions.startswith("ALERTS{"), column


def test_a_tracker_s_page_can_be_opened_and_its_url_is_not_encoded_again() -> None:
    (panel,) = (panel for _, panel in PANELS if panel["title"] == "Experiment trackers")
    (links,) = (one["value"] for one in properties(panel, "Page") if one["id"] == "links")
    assert [link["url"] for link in links] == ["${__value.raw:raw}"]


@each_dashboard
def test_ids_are_unique(model: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in all_panels(model)]
    assert len(ids) == len(set(ids))
    assert 0 < len(model["uid"]) <= 40  # Grafana refuses longer ones


@each_dashboard
def test_panels_stay_on_the_grid_and_off_each_other(model: dict[str, Any]) -> None:
    for together in (model["panels"], *(panel.get("panels") or () for panel in model["panels"])):
        places = [(panel["title"], panel["gridPos"]) for panel in together]
        for title, place in places:
            assert place["x"] + place["w"] <= 24, title
        for (one, a), (other, b) in combinations(places, 2):
            apart_across = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            apart_down = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert apart_across or apart_down, f"{one} lies over {other}"


@each_dashboard
def test_a_collapsed_row_hides_its_own_panels_and_no_other_row_any(model: dict[str, Any]) -> None:
    for row in (panel for panel in model["panels"] if panel["type"] == "row"):
        assert bool(row["collapsed"]) == bool(row["panels"]), row["title"]
        assert all(panel["gridPos"]["y"] > row["gridPos"]["y"] for panel in row["panels"])


@each_dashboard
def test_every_choice_comes_from_prometheus(model: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in model["templating"]["list"]}
    assert variables.pop("datasource")["type"] == "datasource"
    variables.pop("compare", None)
    for name, variable in variables.items():
        query = variable["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]  # a mismatch is a failure
        assert label == name
        assert label in documented_labels()[metric] | {"job", "instance"}
        assert variable["datasource"]["uid"] == "${datasource}"


def test_no_other_run_is_compared_with_until_one_is_chosen() -> None:
    (compare,) = (variable for variable in MODELS["run"]["templating"]["list"] if variable["name"] == "compare")
    query = re.fullmatch(r"query_result\((.*)\)", compare["query"]["query"]).group(1)  # type: ignore[union-attr]  # a mismatch is a failure
    promql_parser.parse(query.replace("$run", "a-run").replace("$__range", "1h"))
    assert f'"{compare["current"]["value"]}"' in query
    pattern = re.compile(compare["regex"].strip("/"))
    # As Grafana writes the series of a query_result before it applies the pattern.
    assert pattern.search('{run="a run, with {signs}"} 1 1761000000000').group(1) == "a run, with {signs}"  # type: ignore[union-attr]  # as above


@pytest.mark.parametrize(
    ("name", "wanted"), [("run", {"datasource", "run", "compare"}), ("node", {"datasource", "instance"})]
)
def test_each_dashboard_offers_what_it_is_about(name: str, wanted: set[str]) -> None:
    assert wanted <= {variable["name"] for variable in MODELS[name]["templating"]["list"]}
