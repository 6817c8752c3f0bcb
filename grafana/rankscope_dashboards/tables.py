"""Tables: one row for each set of labels that the queries share, one column for each chosen label or value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.models import common, table
from grafana_foundation_sdk.models import dashboard as sdk

from rankscope_dashboards.panels import Names, Panel, Query, Steps, override, thresholds, value_mappings

_CELLS = common.TableFieldOptions(cell_options=common.TableAutoCellOptions(), filterable=True)
_BACKGROUND = common.TableColoredBackgroundCellOptions(mode=common.TableCellBackgroundDisplayMode.BASIC)
FILTERED_FROM = 100
"""Pixels of a column whose heading has space for a filter."""


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
    link: str = ""
    """The URL that each cell links to."""
    width: int = 0
    """Pixels; 0 divides the rest of the table among such columns."""
    decimals: int | None = None
    is_wrapped: bool = False
    """Show the whole text, in several lines."""
    is_hidden: bool = False
    """For links of other columns only."""

    def field(self, queries: int) -> str:
        """Return Grafana's name of the column before it is renamed."""
        if not self.source.isupper():
            return self.source
        return f"Value #{self.source}" if queries > 1 else "Value"

    def override(self) -> sdk.DashboardFieldConfigSourceOverrides:
        """Return the column's unit, limits and colors as a Grafana override."""
        # The table's own `noValue` is for a table without lines; it would also fill each empty cell.
        properties: dict[str, object] = {"noValue": ""}
        if self.unit:
            properties["unit"] = self.unit
        if self.unit == "percentunit":
            properties["decimals"] = 0
        if self.steps:
            cell = _BACKGROUND if self.is_filled else common.TableColorTextCellOptions()
            properties |= {"thresholds": thresholds(self.steps), "custom_cellOptions": cell}
        if self.names:
            properties |= {"mappings": value_mappings(self.names), "custom_cellOptions": _BACKGROUND}
        if self.bar:
            gauge = common.TableBarGaugeCellOptions(mode=common.BarGaugeDisplayMode.BASIC)
            properties |= {"min": 0, "max": 1, "custom_cellOptions": gauge}
        if self.is_link:
            # Raw, because Grafana would encode a %20 again. Grafana rejects schemes that run code.
            properties["links"] = [{"title": "Open the page", "url": "${__value.raw:raw}", "targetBlank": True}]
        return override(self.title, **properties, **self._layout())

    def _layout(self) -> dict[str, object]:
        properties: dict[str, object] = {}
        if self.link:
            properties["links"] = [{"title": self.title, "url": self.link}]
        if self.decimals is not None:
            properties["decimals"] = self.decimals
        if self.width:
            properties["custom_width"] = self.width
        if 0 < self.width < FILTERED_FROM:
            properties |= {"custom_filterable": False, "custom_wrapHeaderText": True}
        if self.is_wrapped:
            # The first for Grafana before 12.2.
            properties |= {"custom_cellOptions": common.TableAutoCellOptions(wrap_text=True), "custom_wrapText": True}
        if self.is_hidden:
            properties["custom_hidden"] = True
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

    `sort` is the source of the value by which its lines are sorted, the largest first; with a minus, the smallest.
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
        overrides=[column.override() for column in columns],
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
