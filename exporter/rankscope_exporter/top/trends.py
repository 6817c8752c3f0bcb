"""The step time and the largest lag of each run over the last minutes, as charts of characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from rich.text import Text

from rankscope.record.quantities import duration, percent
from rankscope_exporter.report import describe
from rankscope_exporter.report.runs import NodeReport, RunReport

KEPT_SECONDS = 600.0
LEAST_SECONDS = 60.0
"""The shortest time that a chart shows, so that the first seconds do not fill it."""
CARRIED_SECONDS = 15.0
"""For how long a value is shown without another reading: exporters of many nodes are asked every few seconds."""
LEAST_LAG = 0.1
"""The top of the chart of the lag is at least this, so that noise does not fill it."""
EIGHTHS = " ▁▂▃▄▅▆▇█"
ASCII = " ....####"

RunKey = tuple[str, str, int]


class Moment(NamedTuple):
    """The values of a run at a unix time. None is unknown."""

    at: float
    step_seconds: float | None
    lag: float | None


def key_of(run: RunReport) -> RunKey:
    """Return what identifies a run on the screen: trainings of one rank each may have the same name."""
    return run.run, run.owner, run.ranks[0].rank if run.world_size == 1 and run.ranks else -1


class Trends:
    """The values of each run that this screen has shown in the last KEPT_SECONDS."""

    def __init__(self) -> None:
        self._moments: dict[RunKey, deque[Moment]] = {}

    def add(self, node: NodeReport) -> None:
        """Add a report. Forget runs that are no longer there."""
        known = self._moments
        self._moments = {key: known.get(key, deque()) for key in map(key_of, node.runs)}
        for run in node.runs:
            moments = self._moments[key_of(run)]
            if moments and moments[-1].at >= node.at:
                continue
            lags = [rank.lag_ratio for rank in run.ranks if rank.lag_ratio is not None and rank.is_alive]
            moments.append(Moment(node.at, run.step_seconds, max(lags, default=None)))
            while moments[0].at < node.at - KEPT_SECONDS:
                moments.popleft()

    def charts(self, run: RunReport, width: int, height: int, *, has_color: bool) -> Sequence[Text]:
        """Return the charts of a run's step time and largest lag, each with a heading; none without a value."""
        moments = self._moments.get(key_of(run), deque())
        if not moments:
            return ()
        parts = (
            ("step time", [(one.at, one.step_seconds) for one in moments], describe.short_duration, 0.0, "cyan"),
            ("largest lag as a part of the step", [(one.at, one.lag) for one in moments], percent, LEAST_LAG, "yellow"),
        )
        seconds = max(moments[-1].at - moments[0].at, LEAST_SECONDS)
        charts: list[Text] = []
        for name, values, form, least, color in parts:
            if any(value is not None for _, value in values):
                signs = EIGHTHS if has_color else ASCII
                lines = [*_chart(values, seconds, (width, height), form, least, signs)]
                head = f"Run {describe.name(run)}: {name}, last {duration(seconds)}"
                text = Text(f"{head[:width]}\n", style="dim" if has_color else "", no_wrap=True)
                charts.append(text.append("\n".join(lines), style=f"not dim {color}" if has_color else ""))
        return charts


def _chart(
    values: Sequence[tuple[float, float | None]],
    seconds: float,
    size: tuple[int, int],
    form: Callable[[float], str],
    least: float,
    signs: str,
) -> Iterator[str]:
    """Yield the lines of a chart from 0 to the largest value, whose axis has its ends. Unknown times are empty."""
    highest = max(max(value for _, value in values if value is not None), least) or 1.0
    (width, height), labels = size, (form(highest), form(0.0))
    margin = max(map(len, labels)) + 1
    columns = [*_columns(values, seconds, width - margin)]
    for row in reversed(range(height)):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        levels = (None if value is None else value / highest * height - row for value in columns)
        cells = (signs[0] if level is None else signs[round(8 * min(max(level, 0.0), 1.0))] for level in levels)
        yield f"{label:>{margin - 1}} {''.join(cells)}".rstrip()


def _columns(values: Sequence[tuple[float, float | None]], seconds: float, width: int) -> Iterator[float | None]:
    """Yield the mean value of each column's time; without a reading in it the one before, for CARRIED_SECONDS."""
    by_column: dict[int, list[float | None]] = {}
    begin = values[-1][0] - seconds
    for at, value in values:
        by_column.setdefault(min(int((at - begin) / seconds * width), width - 1), []).append(value)
    last, carried = None, 0.0
    for column in range(width):
        carried += seconds / width
        if column in by_column:
            known = [value for value in by_column[column] if value is not None]
            last, carried = (max(fmean(known), 0.0) if known else None), 0.0
        yield last if carried <= CARRIED_SECONDS else None
