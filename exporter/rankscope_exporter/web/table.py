"""Tables of the status page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """One cell. `kind` is its class: `bad`, `warn`, `good` or none; `html` is shown as it is, `text` is escaped."""

    text: str = ""
    kind: str = ""
    html: str = ""


@dataclass(frozen=True)
class Column:
    """A column's head. A wide one is left out of a narrow window."""

    name: str
    is_number: bool = False
    is_wide: bool = False

    @property
    def classes(self) -> list[str]:
        """Return the classes of its cells."""
        return ["n"] * self.is_number + ["wide"] * self.is_wide + ["text"] * (not self.is_number)


@dataclass(frozen=True)
class Row:
    """Cells in the order of the columns; `kind` as of a cell."""

    cells: Sequence[Cell]
    kind: str = ""


def table(columns: Sequence[Column], rows: Sequence[Row], empty: str = "") -> str:
    """Return the table as HTML, or the text `empty` if it has no row."""
    if not rows:
        return f'<p class="dim">{escape(empty)}</p>' if empty else ""
    head = "".join(f"<th{_class(column.classes)}>{escape(column.name)}</th>" for column in columns)
    body = "".join(f"<tr{_class([row.kind])}>{''.join(map(_cell, columns, row.cells))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: Column, cell: Cell) -> str:
    return f"<td{_class([*column.classes, cell.kind])}>{cell.html or escape(cell.text)}</td>"


def _class(names: Sequence[str]) -> str:
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""
