"""The kinds of panels and their looks: graphs, stacked shares, bars and single values."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models import barchart, common, stat, statetimeline
from grafana_foundation_sdk.models import dashboard as sdk
from grafana_foundation_sdk.models import timeseries as graph
from grafana_foundation_sdk.models.prometheus import Dataquery, PromQueryFormat

from rankscope_dashboards.links import Link
from rankscope_exporter.report.colors import BAD, NEUTRAL, RANK_COLORS

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

NORMAL = "transparent"  # green would suggest that everything else is healthy, too
Steps = Sequence[tuple[float | None, str]]
"""Colors, each from a value upwards. The first value is None, for everything below the second."""
NO_DATA = "no data in this time range"
REST, REST_LEAST = "other ranks, up to", "other ranks, from"
"""The limits of the band in a graph by rank."""
SENTENCE_SIZE = 20  # pixels: two lines fit into the tile
LONGEST_LABEL = 24  # characters: enough for ranks and GPUs, and usually to distinguish runs
Names = Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]] | Mapping[str, tuple[str, str | None]]
"""Text and color to show instead of each value."""


@dataclass(frozen=True)
class Query:
    """A PromQL expression with the legend of its series.

    A query with `needs_fault` may be empty in a healthy run, because it has data only during or after a fault. A `rare`
    one has data only for a run that few users have: with many ranks, or with a tracker.
    """

    expr: str
    legend: str = ""
    needs_fault: bool = False
    rare: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel without its position, which the dashboard chooses."""

    kind: str
    title: str
    description: str
    queries: tuple[Query, ...]
    options: object
    fields: sdk.FieldConfig
    width: int
    height: int = 8
    instant: bool = False
    """Query only the end of the time range."""
    tabular: bool = False
    """Make a column of each label."""
    overrides: Sequence[sdk.DashboardFieldConfigSourceOverrides] = ()
    transformations: Sequence[sdk.DataTransformerConfig] = ()
    points: int | None = None
    """The most points of a series in the time range, for queries over many series."""

    def place(self, identifier: int, x: int, y: int) -> sdk.Panel:
        """Return the panel at a position of the grid, which is 24 columns wide."""
        return sdk.Panel(
            type_val=self.kind,
            id_val=identifier,
            title=self.title,
            description=self.description,
            datasource=DATASOURCE,
            targets=[self._target(string.ascii_uppercase[i], query) for i, query in enumerate(self.queries)],
            grid_pos=sdk.GridPos(x=x, y=y, w=self.width, h=self.height),
            options=self.options,
            field_config=sdk.FieldConfigSource(defaults=self.fields, overrides=list(self.overrides)),
            transformations=list(self.transformations),
            max_data_points=self.points,
        )

    def _target(self, name: str, query: Query) -> Dataquery:
        return Dataquery(
            ref_id=name,
            datasource=DATASOURCE,
            expr=query.expr,
            legend_format=query.legend or "__auto",
            instant=self.instant,
            range_val=not self.instant,
            format_val=PromQueryFormat.TABLE if self.tabular else PromQueryFormat.TIME_SERIES,
        )


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    min_val: float | None = 0,
    max_val: float | None = None,
    limit: float | None = None,
    dashed: str = "",
    colors: Mapping[str, str] | None = None,
    width: int = 12,
    empty: str = NO_DATA,
    links: Sequence[Link] = (),
    band: bool = False,
    points: int | None = None,
) -> Panel:
    """Return a graph with a line for each series.

    The series named `dashed` and the value `limit` are reference lines. A `band` is the area between the series REST
    and REST_LEAST. `empty` is shown if there is no data.
    """
    style = common.GraphFieldConfig(line_width=1, fill_opacity=8, show_points=common.VisibilityMode.NEVER)
    fields = sdk.FieldConfig(
        unit=unit,
        decimals=0 if unit == "none" else None,  # a count
        min_val=min_val,
        max_val=max_val,
        color=_palette(),
        custom=style,
        no_value=empty,
        links=list(links),
    )
    if unit == "percentunit" and max_val is None:
        style.axis_soft_max = 0.1  # without it, the axis of a line at zero would end at 10,000%
    if limit is not None:
        fields.thresholds = thresholds(((None, "transparent"), (limit, BAD)))
        style.thresholds_style = common.GraphThresholdsStyleConfig(mode=common.GraphThresholdsStyleMode.DASHED)
    overrides = [*numbered_colors(), *fixed_colors(colors or {}), *([_dashed(dashed)] if dashed else [])]
    overrides += _band() if band else []
    return Panel(
        "timeseries", title, description, queries, _graph_options(), fields, width, overrides=overrides, points=points
    )


def shares(
    title: str,
    description: str,
    *queries: Query,
    colors: Mapping[str, str],
    width: int = 12,
    height: int = 8,
    empty: str = NO_DATA,
    points: int | None = None,
) -> Panel:
    """Return a graph of shares, stacked to 100%."""
    style = common.GraphFieldConfig(
        line_width=0,
        fill_opacity=80,
        show_points=common.VisibilityMode.NEVER,
        stacking=common.StackingConfig(mode=common.StackingMode.NORMAL, group="A"),
    )
    fields = sdk.FieldConfig(
        unit="percentunit", decimals=0, min_val=0, max_val=1, color=_palette(), custom=style, no_value=empty
    )
    return Panel(
        "timeseries",
        title,
        description,
        queries,
        _graph_options(),
        fields,
        width,
        height,
        overrides=fixed_colors(colors),
        points=points,
    )


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    bar: str,
    part: str,
    colors: Mapping[str, str],
    width: int = 12,
    height: int = 8,
    empty: str = NO_DATA,
) -> Panel:
    """Return a bar chart of shares at the end of the time range, by the label `bar` and stacked by the label `part`."""
    matrix = {"rowField": bar, "columnField": part, "valueField": "Value", "emptyValue": "null"}
    return Panel(
        "barchart",
        title,
        description,
        (query,),
        barchart.Options(
            stacking=common.StackingMode.NORMAL,
            show_value=common.VisibilityMode.NEVER,
            x_tick_label_max_length=LONGEST_LABEL,
            legend=_legend(),
        ),
        sdk.FieldConfig(
            unit="percentunit",
            decimals=0,
            min_val=0,
            max_val=1,
            color=_palette(),
            custom=barchart.FieldConfig(),
            no_value=empty,
        ),
        width,
        height,
        instant=True,
        tabular=True,
        # The bars' names are not percentages.
        overrides=[override(f"{bar}\\{part}", unit="string"), *fixed_colors(colors)],
        transformations=(sdk.DataTransformerConfig(id_val="groupingToMatrix", options=matrix),),
    )


def value(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    steps: Steps = (),
    names: Names | None = None,
    colors: Mapping[str, str] | None = None,
    text: common.BigValueTextMode = common.BigValueTextMode.AUTO,
    empty: str = "-",
    decimals: int | None = None,
    title_size: int | None = None,
    width: int = 4,
    overrides: Sequence[sdk.DashboardFieldConfigSourceOverrides] = (),
) -> Panel:
    """Return a tile with the value at the end of the time range.

    `steps` colors it from 0 upwards. `names` replaces a number with a text and a color; `colors` colors a series.
    `empty` is shown in gray if there is no data. `title_size` is that of the series' name, in pixels. There is no
    graph, as it would also show the last value of a run that has ended.
    """
    colored = bool(steps or names or colors or overrides)
    options = stat.Options(
        color_mode=common.BigValueColorMode.BACKGROUND if colored else common.BigValueColorMode.VALUE,
        graph_mode=common.BigValueGraphMode.NONE,
        justify_mode=common.BigValueJustifyMode.AUTO,
        text_mode=text,
        text=common.VizTextDisplayOptions(title_size=title_size) if title_size else None,
        orientation=common.VizOrientation.AUTO,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"], fields="", values=False),
    )
    base = NEUTRAL if colored else "text"
    fields = sdk.FieldConfig(
        unit=unit,
        decimals=0 if unit == "percentunit" else decimals,
        thresholds=thresholds(((None, base), *steps)),
        color=sdk.FieldColor(),
        mappings=value_mappings(names or {}),
        no_value=empty,
    )
    overrides = [*fixed_colors(colors or {}), *overrides]
    return Panel("stat", title, description, queries, options, fields, width, 4, instant=True, overrides=overrides)


def sentence(
    title: str,
    description: str,
    *queries: Query,
    colors: Mapping[str, str],
    width: int = 24,
    height: int = 3,
) -> Panel:
    """Return a tile with the names of the series at the end of the time range, not their values.

    `colors` has the background by the beginning of the name. Without a series it would be blank.
    """
    options = stat.Options(
        color_mode=common.BigValueColorMode.BACKGROUND_SOLID,
        graph_mode=common.BigValueGraphMode.NONE,
        justify_mode=common.BigValueJustifyMode.CENTER,
        text_mode=common.BigValueTextMode.NAME,
        text=common.VizTextDisplayOptions(title_size=SENTENCE_SIZE, value_size=SENTENCE_SIZE),
        orientation=common.VizOrientation.AUTO,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"], fields="", values=False),
    )
    fields = sdk.FieldConfig(
        unit="none", thresholds=thresholds(((None, NEUTRAL),)), color=sdk.FieldColor(), no_value="unknown"
    )
    overrides = by_regexp(fixed_colors({f"/^{begin}/": color for begin, color in colors.items()}))
    return Panel("stat", title, description, queries, options, fields, width, height, instant=True, overrides=overrides)


def timeline(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "none",
    steps: Steps = (),
    names: Names | None = None,
    links: Sequence[Link] = (),
    width: int = 24,
    height: int = 8,
    empty: str = NO_DATA,
    points: int | None = None,
) -> Panel:
    """Return a row for each series, colored over time by the `steps` that its value exceeds or by `names`."""
    options = statetimeline.Options(
        show_value=common.VisibilityMode.NEVER,
        merge_values=True,
        legend=common.VizLegendOptions(
            show_legend=True, display_mode=common.LegendDisplayMode.LIST, placement=common.LegendPlacement.BOTTOM
        ),
        tooltip=common.VizTooltipOptions(mode=common.TooltipDisplayMode.SINGLE),
        per_page=0,
    )
    fields = sdk.FieldConfig(
        unit=unit,
        decimals=0 if unit == "percentunit" else None,
        thresholds=thresholds(steps or ((None, NEUTRAL),)),
        color=sdk.FieldColor(mode=sdk.FieldColorModeId.THRESHOLDS) if steps else _palette(),
        mappings=[*value_mappings(names), _gap()] if names else [],
        custom=statetimeline.FieldConfig(fill_opacity=100, line_width=0),
        no_value=empty,
        links=list(links),
    )
    return Panel("state-timeline", title, description, queries, options, fields, width, height, points=points)


def thresholds(steps: Steps) -> sdk.ThresholdsConfig:
    """Return the steps as Grafana's thresholds."""
    return sdk.ThresholdsConfig(steps=[sdk.Threshold(value=start, color=color) for start, color in steps])


def value_mappings(names: Names) -> list[sdk.ValueMapping]:
    """Return the names as Grafana's value mappings."""
    results = {
        str(shown): sdk.ValueMappingResult(text=text, color=color, index=index)
        for index, (shown, (text, color)) in enumerate(names.items())
    }
    return [sdk.ValueMap(options=results)] if results else []


def _gap() -> sdk.SpecialValueMap:
    """Return the mapping of a gap in a series, which Grafana else shows with `empty` and a color in the legend."""
    result = sdk.ValueMappingResult(text="no data", color=NORMAL)
    match = sdk.SpecialValueMatch.NULL
    return sdk.SpecialValueMap(options=sdk.DashboardSpecialValueMapOptions(match=match, result=result))


def override(name: str, **properties: object) -> sdk.DashboardFieldConfigSourceOverrides:
    """Return an override of properties of the field `name`. An underscore in a property's name stands for a dot."""
    matcher = sdk.MatcherConfig(id_val="byName", options=name)
    values = [sdk.DynamicConfigValue(id_val=key.replace("_", "."), value=value) for key, value in properties.items()]
    return sdk.DashboardFieldConfigSourceOverrides(matcher=matcher, properties=values)


def fixed_colors(colors: Mapping[str, str]) -> list[sdk.DashboardFieldConfigSourceOverrides]:
    """Return overrides that set the color of each series by name."""
    mode = sdk.FieldColorModeId.FIXED
    return [override(name, color=sdk.FieldColor(mode=mode, fixed_color=color)) for name, color in colors.items()]


def numbered_colors() -> list[sdk.DashboardFieldConfigSourceOverrides]:
    """Return overrides that set the color of ranks and GPUs by number."""
    digits = {rf"/^(rank|GPU) \d*{digit}$/": color for digit, color in enumerate(RANK_COLORS)}
    return by_regexp(fixed_colors(digits))


def by_regexp(
    overrides: list[sdk.DashboardFieldConfigSourceOverrides],
) -> list[sdk.DashboardFieldConfigSourceOverrides]:
    """Return the overrides, whose names are regular expressions."""
    for one in overrides:
        one.matcher.id_val = "byRegexp"
    return overrides


def _graph_options() -> graph.Options:
    tooltip = common.VizTooltipOptions(mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING)
    return graph.Options(legend=_legend(), tooltip=tooltip)


def _dashed(name: str) -> sdk.DashboardFieldConfigSourceOverrides:
    return override(
        name,
        color=sdk.FieldColor(mode=sdk.FieldColorModeId.FIXED, fixed_color=NEUTRAL),
        custom_lineStyle=common.LineStyle(fill="dash", dash=[8, 8]),
        custom_fillOpacity=0,
    )


def _band() -> list[sdk.DashboardFieldConfigSourceOverrides]:
    color = sdk.FieldColor(mode=sdk.FieldColorModeId.FIXED, fixed_color=NEUTRAL)
    plain = {"color": color, "custom_lineWidth": 0}
    return [
        override(REST, **plain, custom_fillBelowTo=REST_LEAST, custom_fillOpacity=35),
        override(REST_LEAST, **plain, custom_fillOpacity=0),
    ]


def _legend() -> common.VizLegendOptions:
    return common.VizLegendOptions(
        show_legend=True, display_mode=common.LegendDisplayMode.LIST, placement=common.LegendPlacement.BOTTOM, calcs=[]
    )


def _palette() -> sdk.FieldColor:
    # Colors in order: the palette by name may give two series similar colors.
    return sdk.FieldColor(mode=sdk.FieldColorModeId.PALETTE_CLASSIC)
