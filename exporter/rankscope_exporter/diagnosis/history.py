"""A run's history over hours: the baselines of its losses, its pauses, its checkpoints.

All of it is bounded and can be saved: `state` returns JSON values, and `restore` reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from statistics import quantiles
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis import speed
from rankscope_exporter.diagnosis.activity import Activity
from rankscope_exporter.diagnosis.detectors.state import Past
from rankscope_exporter.diagnosis.memory import MemoryHistory, MemoryRow
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.saved import Time, restored, rounded, saved
from rankscope_exporter.diagnosis.standstill import Longest, Pace
from rankscope_exporter.diagnosis.thresholds import Thresholds

ROW_SECONDS = 15.0
"""Seconds between two rows of the baselines."""
MINUTE = 60.0
ROWS, MINUTES, LONG = 30, 5, 6
"""The fewest rows of a baseline, the minutes over which skipped steps are counted, and the multiple of the baseline's
time over which checkpoints are counted as well: they may be hours apart."""
BASELINE_AFTER = 1 / 6
"""Ratio of the baseline's time after which it is known."""
LOWER, HIGH = 0.25, 0.9
"""The quantiles of a baseline. A loss that varies exceeds the lower one most of the time, and the high one rarely."""
ROUNDING = 1e-9  # of ten tenths
MORE_BYTES = 1.25
"""Multiple of the bytes in a step from which on it has another baseline. Parts of a few steps vary by less."""
ROW_BYTES, MINUTE_BYTES = 1200, 250


class Loss(NamedTuple):
    """A loss of the whole run; None if nothing was useful, or no step was made."""

    to_useful: float | None
    """Per second of useful work."""
    per_step: float | None
    """In seconds per step."""


class Row(NamedTuple):
    """The whole run's losses in a quarter of a minute: a part of a second has one step, or two."""

    at: Time
    step_bytes: float
    """Bytes that a rank moves in collectives, per step."""
    losses: dict[str, Loss]
    """By kind."""


class Minute(NamedTuple):
    """One minute: the slowest rank's checkpoints, and the loss scale and skipped steps of mixed precision."""

    at: Time
    checkpoint_seconds: float
    checkpoints: float
    amp_scale: float
    amp_skips: float


_SAVED = {
    "rows": tuple[Row, ...],
    "minutes": tuple[Minute, ...],
    "pace": Mapping[str, Longest],
    "stepped": Time | None,
    "speed": tuple[speed.Row, ...],
    "slower": speed.Slower | None,
    "memory": tuple[MemoryRow, ...],
}
"""The types of what is saved, by name."""


class History:
    """The history of one run."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.speed = speed.Speed(thresholds)
        self.row_seconds = min(ROW_SECONDS, thresholds.baseline_seconds / ROWS)
        self._baseline_after = BASELINE_AFTER * thresholds.baseline_seconds
        self._minute = min(MINUTE, thresholds.baseline_seconds / ROWS)
        self._rows: deque[Row] = deque(maxlen=int(thresholds.baseline_seconds / self.row_seconds))
        self._known_quantiles: dict[tuple[str, tuple[float, ...], float], tuple[float | None, float | None]] = {}
        self._minutes: deque[Minute] = deque(maxlen=int(LONG * thresholds.baseline_seconds / self._minute) + 1)
        self._checkpoint = 0.0
        self._activity = Activity(thresholds.idle)
        self.pace = Pace(thresholds)
        self._memory = MemoryHistory(self._minute)

    def kept_bytes(self) -> int:
        """Return about how much memory it takes."""
        rows = ROW_BYTES * len(self._rows) + MINUTE_BYTES * len(self._minutes) + speed.ROW_BYTES * len(self.speed.rows)
        return rows + self._memory.kept_bytes()

    @property
    def has_baseline(self) -> bool:
        """Return whether the rows cover enough time."""
        return bool(self._rows) and self._rows[-1].at - self._rows[0].at >= self._baseline_after

    def observe(self, at: float, ranks: Iterable[RankReading], ended: Iterable[RankReading] = ()) -> None:
        """Add the readings of the living ranks at one moment, and of those that have ended."""
        ranks = tuple(ranks)
        if not ranks:
            return
        self.pace.observe(at, ranks, tuple(ended))
        self._activity.observe(at, ranks)
        self._memory.observe(at, ranks)
        if self._minutes and at - self._minutes[-1].at < self._minute:
            return
        longest = max(ranks, key=lambda one: one.counters.phases.get("checkpoint", 0.0))
        self._minutes.append(
            Minute(
                at,
                longest.counters.phases.get("checkpoint", 0.0),
                max(one.checkpoints for one in ranks),
                min((one.amp_scale for one in ranks if one.amp_scale is not None), default=0.0),
                max(one.counters.amp_skipped_steps for one in ranks),
            )
        )
        self._observe_checkpoints()

    def _observe_checkpoints(self) -> None:
        span = self._thresholds.baseline_seconds
        self._checkpoint = max(self._checkpoint_ratio(span), self._checkpoint_ratio(LONG * span))

    def is_row_due(self, at: float) -> bool:
        """Return whether the newest row is old enough for another one."""
        return not self._rows or at - self._rows[-1].at >= self.row_seconds

    def add(
        self, at: float, losses: Mapping[str, float], useful: float, steps_rate: float, bytes_rate: float = 0.0
    ) -> None:
        """Add a row: the whole run's losses by kind, and its useful ratio, steps and bytes per second."""
        found = {
            kind: Loss(*(rounded(loss / reference) if reference > 0.0 else None for reference in (useful, steps_rate)))
            for kind, loss in losses.items()
        }
        self._rows.append(Row(at, bytes_rate / steps_rate if steps_rate > 0.0 else 0.0, found))
        while at - self._rows[0].at > self._thresholds.baseline_seconds:  # a row may be longer than usual
            self._rows.popleft()
        self._known_quantiles.clear()

    def baseline(
        self,
        kind: str,
        before: float,
        useful: float,
        steps_rate: float,
        quantile: float = LOWER,
        step_bytes: float = 0.0,
    ) -> float | None:
        """Return the run's usual loss before that time, a quantile of the last hour; None in the first minute.

        Steps that moved fewer bytes are not usual: more bytes take longer.

        It is the larger of the loss per second of useful work and the loss per step. A ratio of all time would decrease
        when something else takes more time, and a step with a shorter batch computes less but waits as long as before.
        """
        rows = [row for row in self._rows if row.at <= before and MORE_BYTES * row.step_bytes >= step_bytes]
        to_useful, per_step = self._quantiles(kind, rows, quantile)
        known = (to_useful, useful), (per_step, steps_rate)
        return max((usual * reference for usual, reference in known if usual is not None), default=None)

    def forget(self, kind: str, since: float) -> None:
        """Take the losses of a kind since that time out of its baseline: a fault is not usual."""
        for row in self._rows:
            if row.at >= since:
                row.losses.pop(kind, None)
        self._known_quantiles.clear()

    def _quantiles(self, kind: str, rows: Sequence[Row], quantile: float) -> tuple[float | None, float | None]:
        """Return the quantiles of a loss per useful second and per step. Cached for the same rows."""
        known = kind, tuple(row.at for row in rows), quantile
        if known not in self._known_quantiles:
            losses = [row.losses[kind] for row in rows if kind in row.losses]
            self._known_quantiles[known] = (
                _quantile([loss.to_useful for loss in losses], quantile),
                _quantile([loss.per_step for loss in losses], quantile),
            )
        return self._known_quantiles[known]

    def past(self, at: float) -> Past:
        """Return the history that state detectors read."""
        span = (MINUTES + 1) * self._minute
        recent = list(takewhile(lambda minute: at - minute.at <= span, reversed(self._minutes)))
        skips = sum(max(new.amp_skips - old.amp_skips, 0.0) for new, old in pairwise(recent))
        return Past(
            standstill=self.pace.standstill,
            pace=self.pace.limits(at),
            shortest_limit=self.pace.shortest_limit,
            checkpoint_ratio=self._checkpoint,
            highest_amp_scale=max((minute.amp_scale for minute in recent), default=0.0),
            amp_skips=skips,
            idle=self._activity.idle_seconds(at),
            memory=self._memory.trends,
            slower=self.speed.slower,
        )

    def _checkpoint_ratio(self, span: float) -> float:
        """Return the time in checkpoints as a ratio of the whole span; 0 until there are two checkpoints."""
        if not self._minutes:
            return 0.0
        within = [one for one in self._minutes if self._minutes[-1].at - one.at <= span]
        spent = sum(max(new.checkpoint_seconds - old.checkpoint_seconds, 0.0) for old, new in pairwise(within))
        written = sum(max(new.checkpoints - old.checkpoints, 0.0) for old, new in pairwise(within))
        return spent / span * (1.0 - 1.0 / written) if written > 1.0 else 0.0

    def state(self, at: float) -> dict[str, Any]:
        """Return the history as JSON values."""
        known = {
            "rows": self._rows,
            "minutes": self._minutes,
            "pace": self.pace.longest,
            "stepped": self.pace.stepped_since,
            "speed": self.speed.rows,
            "slower": self.speed.slower,
            "memory": self._memory.rows,
        }
        return {name: saved(kind, known[name], at) for name, kind in _SAVED.items()}

    def restore(self, state: Mapping[str, Any], at: float) -> None:
        """Restore what `state` returned. Raise one of UNREADABLE and change nothing if it is damaged."""
        known = {name: restored(kind, state[name], at) for name, kind in _SAVED.items()}
        self._rows.extend(known["rows"])
        self._minutes.extend(known["minutes"])
        self.pace.longest = known["pace"]
        self.pace.stepped_since = known["stepped"]
        self.speed.rows.extend(known["speed"])
        self.speed.slower = known["slower"]
        self._memory.restore(known["memory"])
        self._observe_checkpoints()


def _quantile(values: Iterable[float | None], quantile: float) -> float | None:
    """Return the quantile; None if no value can lie beyond it. The first steps of a run are not usual: they compile."""
    known = [value for value in values if value is not None]
    if len(known) * min(quantile, 1.0 - quantile) < 1.0 - ROUNDING:
        return None
    return quantiles(known, n=20, method="inclusive")[round(20 * quantile) - 1]
