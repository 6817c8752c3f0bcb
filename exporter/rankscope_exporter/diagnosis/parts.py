"""The losses of a run in consecutive parts of its time, in three resolutions. Persistence is decided on them."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import mul
from statistics import fmean

from rankscope_exporter.diagnosis.thresholds import Tier

Key = tuple[str, int | None]
"""A detector's kind, and the rank if the loss belongs to one rank."""

RESOLUTIONS = (0.0, 5.0, 30.0)
"""The shortest length of a part in seconds; 0 for parts as they were measured."""
CAPACITY = 64
"""The number of parts that are kept of each resolution."""
BY_CHANCE = 2.0
"""Standard errors by which the lag of one of two ranks exceeds the other's by chance, if they are late in turn."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run's time. `values` are by column of a key; NaN if the loss is unknown."""

    ends: float
    seconds: float
    steps: float
    values: array[float]


class Span:
    """Consecutive parts, the newest first."""

    def __init__(self, parts: Sequence[Part], columns: Mapping[Key, int]) -> None:
        self._parts = parts
        self._columns = columns
        self.begins = parts[-1].ends - parts[-1].seconds
        self.steps = sum(part.steps for part in parts)

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    def values(self, key: Key) -> list[float]:
        """Return the losses, the newest first; NaN where they are unknown."""
        column = self._columns.get(key)
        if column is None:
            return [math.nan] * len(self._parts)
        return [part.values[column] if column < len(part.values) else math.nan for part in self._parts]

    def mean(self, key: Key) -> float | None:
        """Return the mean loss of the parts in which it is known; None if it is in no part."""
        known = [value for value in self.values(key) if not math.isnan(value)]
        return fmean(known) if known else None

    def median(self, key: Key) -> float:
        """Return the median over the steps of the parts in which it is known, or 0. A pause counts as one step."""
        known = zip(self.values(key), self._parts, strict=True)
        return _weighted_median((value, part.steps) for value, part in known if not math.isnan(value))

    def steps_rate(self) -> float:
        """Return the steps per second, without pauses: the parts with less than half of the usual rate."""
        usual = _weighted_median((part.steps / part.seconds, part.steps) for part in self._parts)
        kept = [part for part in self._parts if 2.0 * part.steps >= usual * part.seconds]
        return sum(part.steps for part in kept) / sum(part.seconds for part in kept)

    def exceeds(self, key: Key, tier: Tier, allowance: float = 0.0) -> bool:
        """Return whether the loss beyond the allowance exceeds the tier. An unknown loss is below every limit."""
        mean = self.mean(key)
        if mean is None or mean - allowance <= tier.limit:
            return False
        dips = sum(not value - allowance > tier.limit / 2 for value in self.values(key))
        return dips <= tier.dips * len(self._parts)

    def beyond_one(self, key: Key, ranks: Collection[Key], tier: Tier) -> float | None:
        """Return the mean loss of a run without what one rank's loss explains of it; None if it is unknown.

        It may be another rank in each block of parts that covers the tier. A loss that a rank has by chance, if each
        step is another rank's, explains nothing.
        """
        total = known = 0.0
        for block in self._blocks(tier):
            if (mean := block.mean(key)) is not None:
                largest = max((loss for rank in ranks if (loss := block.mean(rank)) is not None), default=0.0)
                by_chance = BY_CHANCE * mean / math.sqrt(max(block.steps, 1.0))
                total += len(block) * (mean - largest if largest > by_chance else mean)
                known += len(block)
        return total / known if known else None

    def _blocks(self, tier: Tier) -> Sequence[Span]:
        """Return consecutive spans, the newest first, that cover the tier; the last one has the rest."""
        blocks: list[list[Part]] = [[]]
        for part in self._parts:
            if _covers(blocks[-1], tier):
                blocks.append([])
            blocks[-1].append(part)
        if len(blocks) > 1 and not _covers(blocks[-1], tier):
            rest = blocks.pop()
            blocks[-1] += rest
        return [Span(block, self._columns) for block in blocks]

    def rise(self, key: Key, level: float) -> Span:
        """Return the newest parts in which the loss has been above the level.

        They begin where the sum of what exceeds the level is largest, as in Page's CUSUM test: a single part above or
        below the level does not change it.
        """
        total, largest, count = 0.0, -math.inf, 1
        for number, value in enumerate(self.values(key), start=1):
            total += 0.0 if math.isnan(value) else value - level
            if total >= largest:
                largest, count = total, number
        return Span(self._parts[:count], self._columns)


class Parts:
    """The parts of a run. They are added as they are measured, and merged into longer ones."""

    def __init__(self) -> None:
        self.columns: dict[Key, int] = {}
        self._rings: list[deque[Part]] = [deque(maxlen=CAPACITY) for _ in RESOLUTIONS]
        self._open: list[list[Part]] = [[] for _ in RESOLUTIONS]

    @property
    def keys(self) -> Collection[Key]:
        """The keys of all losses that were added."""
        return self.columns

    def add(self, ends: float, seconds: float, steps: float, losses: Mapping[Key, float]) -> None:
        """Add the newest part."""
        for key in losses:
            self.columns.setdefault(key, len(self.columns))
        values = array("d", [math.nan]) * len(self.columns)
        for key, loss in losses.items():
            values[self.columns[key]] = loss
        self._add(Part(ends, seconds, steps, values))

    def span(self, tier: Tier, key: Key | None = None) -> Span | None:
        """Return the newest parts that cover the tier; None if there are too few yet.

        Choose the longest parts of which the tier's number fits into its seconds, so that every part contains what
        happens once in a few steps. With a key, return only the parts in which its loss is known.
        """
        fitting = [
            ring for ring, long in zip(self._rings, RESOLUTIONS, strict=True) if long * tier.parts <= tier.seconds
        ]
        newest: list[Part] = []
        seconds = steps = 0.0
        for part in reversed(fitting[-1]):
            if key is None or self._is_known(part, key):
                newest.append(part)
            seconds, steps = seconds + part.seconds, steps + part.steps
            if seconds >= tier.seconds and steps >= tier.steps and len(newest) >= tier.parts:
                return Span(newest, self.columns)
        return None

    def _is_known(self, part: Part, key: Key) -> bool:
        column = self.columns.get(key, len(part.values))
        return column < len(part.values) and not math.isnan(part.values[column])

    def _add(self, part: Part) -> None:
        for ring, waiting, resolution in zip(self._rings, self._open, RESOLUTIONS, strict=True):
            waiting.append(part)
            if sum(one.seconds for one in waiting) >= resolution:
                ring.append(_merge(waiting))
                waiting.clear()


def _covers(parts: Sequence[Part], tier: Tier) -> bool:
    seconds, steps = sum(part.seconds for part in parts), sum(part.steps for part in parts)
    return seconds >= tier.seconds and steps >= tier.steps


def _merge(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    weights = [part.seconds for part in parts]
    columns = zip_longest(*(part.values for part in parts), fillvalue=math.nan)
    values = array("d", (_mean(weights, column) for column in columns))
    return Part(parts[-1].ends, sum(weights), sum(part.steps for part in parts), values)


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return the weighted mean of the known values; NaN if none is known."""
    total: float = sum(map(mul, weights, values))
    if not math.isnan(total):
        return total / sum(weights)
    known = [(weight, value) for weight, value in zip(weights, values, strict=True) if not math.isnan(value)]
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known) if known else math.nan


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the median of values with weights, or 0 without values."""
    known = sorted(weighted)
    half = sum(weight for _, weight in known) / 2
    reached = accumulate(weight for _, weight in known)
    return next((value for (value, _), weight in zip(known, reached, strict=True) if weight >= half), 0.0)
