"""HTML tables for the status page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """One cell. `kind` is its CSS class (`bad`, `warn`, `good` or empty); `text` is escaped, `html` is not."""

    text: str = ""
    kind: str = ""
    html: str = ""


@dataclass(frozen=True)
class Column:
    """The heading of a column. A column with `is_wide` is hidden in a narrow window."""

    name: str
    is_number: bool = False
    is_wide: bool = False

    @property
    def classes(self) -> list[str]:
        """CSS classes of the column's cells."""
        return ["n"] * self.is_number + ["wide"] * self.is_wide + ["text"] * (not self.is_number)


@dataclass(frozen=True)
class Row:
    """Cells in the order of the columns. `kind` is as in `Cell`."""

    cells: Sequence[Cell]
    kind: str = ""


def prose(text: str) -> str:
    """Return a text as HTML: what is between two backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def table(columns: Sequence[Column], rows: Sequence[Row], name: str, empty: str = "") -> str:
    """Return the table as HTML, or the text `empty` if it has no rows. A screen reader reads its name.

    A column without any text is left out: what it shows is not known, or there is none.
    """
    if not rows:
        return f'<p class="dim">{escape(empty)}</p>' if empty else ""
    shown = [i for i in range(len(columns)) if any(row.cells[i].text or row.cells[i].html for row in rows)]
    head = "".join(f'<th scope="col"{_class(columns[i].classes)}>{escape(columns[i].name)}</th>' for i in shown)
    lines = ((row.kind, "".join(_cell(columns[i], row.cells[i]) for i in shown)) for row in rows)
    body = "".join(f"<tr{_class([kind])}>{cells}</tr>" for kind, cells in lines)
    scroll = f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">'
    return f"{scroll}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(column: Column, cell: Cell) -> str:
    return f"<td{_class([*column.classes, cell.kind])}>{cell.html or escape(cell.text)}</td>"


def _class(names: Sequence[str]) -> str:
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""
