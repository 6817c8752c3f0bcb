"""A dashboard: rows of panels on Grafana's grid, its variables, and the JSON that Grafana loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as sdk
from grafana_foundation_sdk.models.prometheus import Dataquery

from rankscope_dashboards.panels import DATASOURCE, Panel

GRID_WIDTH = 24
TAG = "rankscope"
# Read by every Grafana from 10.0 on; newer ones migrate it when they load it.
SCHEMA_VERSION = 38
# JSON has no comments, and Grafana shows this to whoever wonders why a dashboard cannot be edited.
MADE_BY = "Made by grafana/generate.py (`make generate`); to change it, save it under another name."
NO_RUN = "(none)"  # of which no run has the name, so that its panels are empty


@dataclass(frozen=True)
class Row:
    """Panels below a heading, side by side until the grid's width is used up.

    `collapsed`: detail, which is shown, and asked of Prometheus, once somebody opens it.
    """

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True)
class Dashboard:
    """What a dashboard is made of. `alerts` is the query for what is marked on its graphs."""

    uid: str
    title: str
    description: str
    variables: Sequence[sdk.VariableModel]
    rows: Sequence[Row]
    alerts: str

    def to_json(self) -> str:
        """The dashboard as Grafana loads it, with a newline at its end."""
        model = sdk.Dashboard(
            uid=self.uid,
            title=self.title,
            description=f"{self.description} {MADE_BY}",
            tags=[TAG],
            editable=False,
            graph_tooltip=sdk.DashboardCursorSync.CROSSHAIR,
            schema_version=SCHEMA_VERSION,
            time=sdk.DashboardDashboardTime(from_val="now-30m", to="now"),
            refresh="15s",
            templating=sdk.DashboardDashboardTemplating(list_val=[_datasource(), *self.variables]),
            annotations=sdk.AnnotationContainer(list_val=[_alerts(self.alerts)]),
            links=[_links()],
            panels=list(_placed(self.rows)),
        )
        return json.dumps(model, cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


def label_values(
    name: str, selector: str, *, label: str, description: str, everything: bool = False, descending: bool = False
) -> sdk.VariableModel:
    """A variable whose choices are the values of the label `name` in `selector`; `everything` offers all at once."""
    return sdk.VariableModel(
        type_val=sdk.VariableType.QUERY,
        name=name,
        label=label,
        description=description,
        datasource=DATASOURCE,
        query={"query": f"label_values({selector}, {name})", "refId": name},
        definition=f"label_values({selector}, {name})",
        # The choices follow the time range, so that a run of yesterday can be chosen too.
        refresh=sdk.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=sdk.VariableSort.NATURAL_DESC if descending else sdk.VariableSort.NATURAL_ASC,
        multi=everything,
        include_all=everything,
        all_value=".*" if everything else None,
        current=sdk.VariableOption(selected=True, text="All", value="$__all") if everything else None,
    )


def other_run(name: str, this: str, *, label: str, description: str) -> sdk.VariableModel:
    """A variable whose choices are the runs other than the variable `this`, and at first `none`."""
    runs = f'group by (run) (last_over_time(rankscope_rank_info{{run!="${this}"}}[$__range]))'
    return sdk.VariableModel(
        type_val=sdk.VariableType.QUERY,
        name=name,
        label=label,
        description=description,
        datasource=DATASOURCE,
        # Not label_values: Grafana would choose the first run for whoever chooses none.
        query={"query": f'query_result(label_replace(vector(1), "run", "{NO_RUN}", "", "") or {runs})', "refId": name},
        regex='/run="([^"]+)"/',
        refresh=sdk.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=sdk.VariableSort.NATURAL_DESC,
        current=sdk.VariableOption(selected=True, text=NO_RUN, value=NO_RUN),
    )


def _placed(rows: Sequence[Row]) -> Iterator[sdk.Panel | sdk.RowPanel]:
    identifiers, y = count(1), 0
    for row in rows:
        heading = sdk.RowPanel(id_val=next(identifiers), title=row.title, collapsed=row.collapsed)
        heading.grid_pos = sdk.GridPos(x=0, y=y, w=GRID_WIDTH, h=1)
        panels, below = _below(y + 1, row.panels, identifiers)
        yield heading
        if row.collapsed:
            heading.panels, y = panels, y + 1
        else:
            yield from panels
            y = below


def _below(y: int, panels: Sequence[Panel], identifiers: Iterator[int]) -> tuple[list[sdk.Panel], int]:
    """The panels of a row that begins at `y`, and where the next row begins."""
    placed, x, height = [], 0, 0
    for panel in panels:
        if x + panel.width > GRID_WIDTH:
            x, y, height = 0, y + height, 0
        placed.append(panel.placed(next(identifiers), x, y))
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height


def _datasource() -> sdk.VariableModel:
    return sdk.VariableModel(
        type_val=sdk.VariableType.DATASOURCE,
        name="datasource",
        label="Prometheus",
        description="The Prometheus that scrapes the exporters.",
        query="prometheus",
        refresh=sdk.VariableRefresh.ON_DASHBOARD_LOAD,
    )


def _alerts(expr: str) -> sdk.AnnotationQuery:
    return sdk.AnnotationQuery(
        name="Alerts",
        datasource=DATASOURCE,
        enable=True,
        hide=True,
        icon_color="red",
        target=Dataquery(ref_id="Alerts", datasource=DATASOURCE, expr=expr, range_val=True),
        title_format="{{alertname}}",
        text_format="rank {{rank}} gpu {{gpu}} {{cause}}",
    )


def _links() -> sdk.DashboardLink:
    return sdk.DashboardLink(
        title="Rankscope",
        type_val=sdk.DashboardLinkType.DASHBOARDS,
        tags=[TAG],
        keep_time=True,
        include_vars=True,
    )
