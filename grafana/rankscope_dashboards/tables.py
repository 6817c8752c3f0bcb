"""Tables: one row for each set of labels that the queries share, one column for each chosen label or value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.models import common, table
from grafana_foundation_sdk.models import dashboard as sdk

from rankscope_dashboards.links import Link
from rankscope_dashboards.panels import (
    NORMAL,
    Names,
    Panel,
    Query,
    Steps,
    by_regexp,
    override,
    thresholds,
    value_mappings,
)
from rankscope_exporter.report.colors import STATE_COLORS

_CELLS = common.TableFieldOptions(cell_options=common.TableAutoCellOptions())
_BACKGROUND = common.TableColoredBackgroundCellOptions(mode=common.TableCellBackgroundDisplayMode.BASIC)
NARROW = 100
"""Pixels of a column below which its heading may need several lines."""


@dataclass(frozen=True)
class Column:
    """A column. `source` is a label, or `A`, `B`, … for the value of the first, second, … query."""

    source: str
    title: str
    unit: str = ""
    steps: Steps = ()
    is_filled: bool = False
    """Color the cell by `steps`, not its text."""
    names: Names | None = None
    bar: bool = False
    """Draw the value, a ratio, as a bar."""
    is_link: bool = False
    """Link to the value, a URL. The exporter publishes no URL with a password or a query string."""
    texts: Mapping[str, str] | None = None
    """Texts to show instead of values, without a color."""
    wrap: bool = False
    """Show a long text in several lines."""
    link: Link | None = None
    hidden: bool = False
    """Only links use the column."""
    filterable: bool = False
    width: int | None = None
    """In pixels; by default the columns share the width."""
    decimals: int | None = None

    def field(self, queries: int) -> str:
        """Return Grafana's name of the column before it is renamed."""
        if not self.source.isupper():
            return self.source
        return f"Value #{self.source}" if queries > 1 else "Value"

    def override(self) -> sdk.DashboardFieldConfigSourceOverrides:
        """Return the column's unit, limits, colors, links and width as a Grafana override."""
        properties = self._look() | self._cell()
        if self.unit:
            properties["unit"] = self.unit
        decimals = 0 if self.unit == "percentunit" else self.decimals
        if decimals is not None:
            properties["decimals"] = decimals
        if self.is_link:
            # Raw, because Grafana would encode a %20 again. Grafana rejects schemes that run code.
            properties["links"] = [{"title": "Open the page", "url": "${__value.raw:raw}", "targetBlank": True}]
        if self.link:
            properties["links"] = [self.link]
        return override(self.title, **properties)

    def _look(self) -> dict[str, object]:
        properties: dict[str, object] = {}
        if self.hidden:
            properties |= {"custom_hidden": True, "custom_hideFrom": {"viz": True}}
        if self.width:
            properties["custom_width"] = self.width
        if self.filterable:
            properties["custom_filterable"] = True
        if 0 < (self.width or 0) < NARROW:
            properties["custom_wrapHeaderText"] = True
        return properties

    def _cell(self) -> dict[str, object]:
        properties: dict[str, object] = {}
        if self.steps:
            cell = _BACKGROUND if self.is_filled else common.TableColorTextCellOptions()
            properties |= {"thresholds": thresholds(self.steps), "custom_cellOptions": cell}
        if self.names:
            unnamed = thresholds(((None, NORMAL),))
            properties |= {"mappings": value_mappings(self.names), "thresholds": unnamed}
            properties["custom_cellOptions"] = _BACKGROUND
        if self.bar:
            gauge = common.TableBarGaugeCellOptions(mode=common.BarGaugeDisplayMode.BASIC)
            blue = sdk.FieldColor(mode=sdk.FieldColorModeId.FIXED, fixed_color=STATE_COLORS["working"])
            properties |= {"min": 0, "max": 1, "color": blue, "custom_cellOptions": gauge}
        if self.texts:
            properties["mappings"] = value_mappings({value: (text, None) for value, text in self.texts.items()})
        if self.wrap:
            # The first for Grafana before 12.2.
            properties |= {"custom_cellOptions": common.TableAutoCellOptions(wrap_text=True), "custom_wrapText": True}
        return properties


def table_of(
    title: str,
    description: str,
    queries: Sequence[Query],
    columns: Sequence[Column],
    *,
    width: int = 24,
    height: int = 8,
    empty: str = "-",
    sort: str = "",
) -> Panel:
    """Return a table with these columns, in this order. Other labels and values are not shown.

    `empty` is shown instead of the table if there are no rows. A cell without a value is empty. `sort` is the source of
    the value by which its lines are sorted, the largest first; with a minus, the smallest.
    """
    return Panel(
        "table",
        title,
        description,
        tuple(queries),
        table.Options(cell_height=common.TableCellHeight.SM),
        sdk.FieldConfig(unit="none", no_value=empty, custom=_CELLS),
        width,
        height,
        instant=True,
        tabular=True,
        overrides=[*by_regexp([override("/.*/", noValue="")]), *(column.override() for column in columns)],
        transformations=_transformations(columns, len(queries), sort),
    )


def or_words(vector: str, label: str, words: str, **labels: str) -> str:
    """Return the query of a table's lines, or of one line with these words as the label if there are none.

    Grafana shows the words of an empty table only if the table has a single query.
    """
    line = f'label_replace(vector(0), "{label}", "{words}", "", "")'
    for name, text in labels.items():
        line = f'label_replace({line}, "{name}", "{text}", "", "")'
    return f"{vector} or on () {line}"


def _transformations(columns: Sequence[Column], queries: int, sort: str) -> list[sdk.DataTransformerConfig]:
    fields = [column.field(queries) for column in columns]
    keep: dict[str, Any] = {"include": {"names": fields}}
    arrange: dict[str, Any] = {
        "indexByName": {field: index for index, field in enumerate(fields)},
        "renameByName": {field: column.title for field, column in zip(fields, columns, strict=True)},
        "excludeByName": {},
    }
    by = [{"field": Column(sort.removeprefix("-"), "").field(queries), "desc": not sort.startswith("-")}]
    return [
        sdk.DataTransformerConfig(id_val="merge", options={}),
        *([sdk.DataTransformerConfig(id_val="sortBy", options={"sort": by})] if sort else []),
        sdk.DataTransformerConfig(id_val="filterFieldsByName", options=keep),
        sdk.DataTransformerConfig(id_val="organize", options=arrange),
    ]
