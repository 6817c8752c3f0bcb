"""The parts of the screen that fit on a terminal: rows of each table, and the first problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console, RenderableType
from rich.segment import Segment

Line = list[Segment]
LEAST_ROWS = 2
"""The rows of a table from which on it is better than its heading alone."""


@dataclass(frozen=True)
class Section:
    """A heading and a table, of which a part can be shown."""

    head: RenderableType | None
    short: RenderableType
    """What is shown, in one line, if there is no room for rows."""
    rows: int
    table: Callable[[int], RenderableType]
    """Returns the table with so many rows."""
    more: Callable[[int], RenderableType]
    """Returns the line that says what is left out of a table with so many rows."""


class Lines:
    """Renders parts of the screen as lines of a width."""

    def __init__(self, console: Console, width: int) -> None:
        self._console, self._options = console, console.options.update(width=width, height=None)
        self.width = width

    def narrower(self, width: int) -> Lines:
        """Return the same for a column of this width."""
        return Lines(self._console, width)

    def of(self, part: RenderableType) -> list[Line]:
        """Return the lines of a part."""
        return self._console.render_lines(part, self._options, pad=False)

    def section(self, section: Section, rows: int) -> list[Line]:
        """Return a section with so many rows, after an empty line; without rows its short form."""
        if not rows:
            return self.of(section.short)[:1]
        more = self.of(section.more(rows))[:1] if rows < section.rows else []
        return [[], *self.head(section), *self.of(section.table(rows)), *more]

    def head(self, section: Section) -> list[Line]:
        """Return the lines of a section's heading."""
        return [] if section.head is None else self.of(section.head)


def side_by_side(left: Sequence[Line], right: Sequence[Line], width: int, gap: int) -> list[Line]:
    """Return the lines of two columns, of which the left one has this width."""
    height = max(len(left), len(right))
    columns = ([*column, *([[]] * (height - len(column)))] for column in (left, right))
    return [
        [*Segment.adjust_line_length(one, width), Segment(" " * gap), *other] if other else one
        for one, other in zip(*columns, strict=True)
    ]


def share_rows(lines: Lines, sections: Sequence[Section], height: int, first: int | None = None) -> list[int]:
    """Return how many rows of each section fit, in the order of their importance; 0 is the short form.

    Each gets a few rows, as far as possible, then all get more in turn. The section `first` gets all that it can.
    """
    heads = [len(lines.head(section)) for section in sections]
    rows, left = [0] * len(sections), height - len(sections)

    def cost(i: int, count: int) -> int:
        """Return the lines of a section with so many rows: also an empty one, and the names of the columns."""
        return 1 if not count else 2 + heads[i] + count + (count < sections[i].rows)

    order = sorted(range(len(sections)), key=lambda i: i != first)
    for i in order:
        least = min(LEAST_ROWS, sections[i].rows)
        if cost(i, least) - 1 <= left and least:
            left -= cost(i, least) - 1
            rows[i] = least
    grows = True
    while grows:
        grows = False
        for i in order:
            while 0 < rows[i] < sections[i].rows and cost(i, rows[i] + 1) - cost(i, rows[i]) <= left:
                left -= cost(i, rows[i] + 1) - cost(i, rows[i])
                rows[i] += 1
                grows = True
                if i != first:
                    break
    return rows


def first_that_fit(
    lines: Lines, entries: Sequence[Sequence[RenderableType]], height: int, more: Callable[[int], RenderableType]
) -> list[Line]:
    """Return the lines of the first entries. Those that fit only without their last parts are shown without them."""
    shown: list[Line] = []
    for i, parts in enumerate(entries):
        room = height - len(shown) - (i + 1 < len(entries))
        blocks = [lines.of(part) for part in parts]
        while len(blocks) > 1 and sum(map(len, blocks)) > room:
            blocks.pop()
        if shown and sum(map(len, blocks)) > room:
            return [*shown, *lines.of(more(len(entries) - i))[:1]]
        shown += chain.from_iterable(blocks)
    return shown
