"""The losses of a run in consecutive parts of its time, in three resolutions. Persistence is decided on them."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from operator import mul

from rankscope_exporter.diagnosis import chance
from rankscope_exporter.diagnosis.late_set import Ranks

Key = tuple[str, Ranks]
"""A detector's kind, and the ranks to which the loss belongs; empty for the whole run."""
Column = tuple[str, int | None]
"""What a part has of a kind: the loss of the whole run, or the wait of each rank for later ones. The loss of a set of
ranks follows from the waits."""

RESOLUTIONS = (0.0, 8.0, 100.0)
"""The shortest length of a part in seconds; 0 for parts as they were measured."""
CAPACITY = 64
"""The number of parts that are kept of each resolution."""
LENGTHS = (3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""The numbers of newest parts in which a loss is sought."""
FITTING = 8
TURNS = 2
"""How often a rank and others may have been late in turn before it is steadily late. Ranks that are late at random are
so for several steps at times."""
BY_CHANCE = 2.0
"""Standard errors by which the lags of ranks differ by chance, if they are late in turn."""
FEW_EVENTS, MANY_EVENTS = 5.0, 16.0
"""Numbers of events of equal size: from the first on, they show whether they are the same rank's, from the second on
well."""


def concerns_only(key: Key, ranks: Collection[int]) -> bool:
    """Return whether a loss is that of one or more ranks, all of them among these."""
    return bool(key[1]) and set(key[1]) <= set(ranks)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run's time. `values` are by the number of a column; NaN if the loss is unknown."""

    ends: float
    seconds: float
    steps: float
    values: array[float]
    compared: float
    """The seconds of its steps that were compared between ranks, or all of its seconds; 0 if none could be compared."""
    last: Mapping[int, float]
    """By the number of a column: the lag of the ranks that were last among those that they are compared with."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """A loss over a span, and the probability that it is a matter of chance.

    It is the least of two: by the deviation of its parts, and by the number of events, which are parts of any size.
    """

    span: Span
    mean: float
    chance: float


class Peers:
    """The ranks that do the same work, and those of them that are known to be late."""

    def __init__(self) -> None:
        self.groups: Sequence[Ranks] = ()
        self.late: Collection[int] = ()

    def still_late(self, ranks: Ranks) -> Ranks:
        """Return the ranks of a set that are still late: of a set that is not known to be late, all."""
        return tuple(rank for rank in ranks if rank in self.late) or ranks

    def of(self, ranks: Ranks) -> Ranks:
        """Return the peers of a set, with its own ranks; empty for the whole run."""
        return next((group for group in self.groups if ranks and ranks[0] in group), ())

    def others(self, ranks: Ranks) -> Ranks:
        """Return the peers of a set that are not late; all its peers if all are late."""
        own = frozenset(ranks)
        others = tuple(rank for rank in self.of(ranks) if rank not in own)
        return tuple(rank for rank in others if rank not in self.late) or others


class Span:
    """Consecutive parts, the newest first."""

    def __init__(self, parts: Sequence[Part], run: Parts, older: Sequence[Part] = ()) -> None:
        """Set the parts, all parts of the run, and those before this span."""
        self._parts, self._run, self._older = parts, run, older
        self.begins = parts[-1].ends - parts[-1].seconds
        self.seconds = sum(part.seconds for part in parts)
        self.steps = sum(part.steps for part in parts)

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    def values(self, key: Key) -> list[float]:
        """Return the losses, the newest first; NaN where they are unknown."""
        kind, ranks = key
        if ranks:
            ranks = self._run.peers.still_late(ranks)
            return self.lags(kind, ranks, self._run.peers.others(ranks))
        return self._column(kind, None)

    def _column(self, kind: str, rank: int | None) -> list[float]:
        number = self._run.columns.get((kind, rank))
        if number is None:
            return [math.nan] * len(self._parts)
        return [part.values[number] if number < len(part.values) else math.nan for part in self._parts]

    def lags(self, kind: str, ranks: Ranks, others: Ranks) -> list[float]:
        """Return how much longer the others wait on average than these ranks."""
        late, reference = (self._columns_of(kind, of) for of in (ranks, others))
        return [_mean_of(part.values, reference) - _mean_of(part.values, late) for part in self._parts]

    def waits(self, kind: str, ranks: Ranks) -> Mapping[int, float]:
        """Return the mean wait by rank; empty if it is unknown."""
        columns, weights = self._columns_of(kind, ranks), self.weights(kind)
        parts = zip(weights, self._parts, strict=True)
        rows = [(weight, part.values) for weight, part in parts if not math.isnan(_mean_of(part.values, columns))]
        total = sum(weight for weight, _ in rows)
        if not total:
            return {}
        return {
            rank: sum([weight * values[column] for weight, values in rows]) / total
            for rank, column in zip(ranks, columns, strict=True)
        }

    def _columns_of(self, kind: str, ranks: Ranks) -> Sequence[int]:
        """Return the columns of the waits; empty if one is unknown."""
        columns = [self._run.columns.get((kind, rank)) for rank in ranks]
        return [column for column in columns if column is not None] if None not in columns else []

    def weights(self, kind: str) -> list[float]:
        """Return the seconds in which the losses were measured."""
        return [part.compared if kind in self._run.compared else part.seconds for part in self._parts]

    def mean(self, key: Key) -> float | None:
        """Return the mean loss of the time in which it is known; None if it is in no part."""
        mean = _mean(self.weights(key[0]), self.values(key))
        return None if math.isnan(mean) else mean

    def median(self, key: Key) -> float:
        """Return the median over the steps of the parts in which it is known, or 0. A pause counts as one step."""
        known = zip(self.values(key), self._parts, strict=True)
        return _weighted_median((value, part.steps) for value, part in known if not math.isnan(value))

    def steps_rate(self) -> float:
        """Return the steps per second, without pauses: the parts with less than half of the usual rate."""
        usual = _weighted_median((part.steps / part.seconds, part.steps) for part in self._parts)
        kept = [part for part in self._parts if 2.0 * part.steps >= usual * part.seconds]
        return sum(part.steps for part in kept) / sum(part.seconds for part in kept)

    def lasting(self, key: Key, allowance: float) -> Iterator[Lasting]:
        """Yield how long a loss beyond the allowance has lasted, for some numbers of the newest parts.

        Parts in which it is unknown do not count.
        """
        kind, ranks = key
        late, rivals = (frozenset(self._columns_of(kind, of)) for of in (ranks, self._run.peers.of(ranks)))
        sets = math.comb(len(rivals), len(late))
        values, weights = self.values(key), self.weights(kind)
        known = [number for number, value in enumerate(values) if not math.isnan(value)]
        weighted = [(weights[number], values[number] - allowance) for number in known]
        sums = list(accumulate(weight for weight, _ in weighted))
        sizes = [max(weight * value, 0.0) for weight, value in weighted]
        totals, squares = list(accumulate(sizes)), list(accumulate(size * size for size in sizes))
        means = accumulate(weight * value for weight, value in weighted)
        last = [self._parts[number].last for number in known]
        own, any_of = (list(accumulate(not of.isdisjoint(columns) for columns in last)) for of in (late, rivals))
        for index, (total, steady) in enumerate(zip(means, chance.steadiness(weighted), strict=True)):
            if index + 1 in LENGTHS:
                mean = total / sums[index]
                by_events = chance.of_one_place(chance.events(totals[index], squares[index]))
                if rivals:
                    by_events = max(by_events, chance.of_most(own[index], any_of[index], len(late), len(rivals)))
                    is_in_turn = self._turns(values, rivals, known[index] + 1, mean / 2) > TURNS
                    steady = 1.0 if is_in_turn else steady * sets
                yield Lasting(self._newest(known[index] + 1), mean + allowance, min(steady, by_events))

    def _newest(self, count: int) -> Span:
        return Span(self._parts[:count], self._run, [*self._parts[count:], *self._older])

    def _turns(self, lags: Sequence[float], rivals: Collection[int], before: int, level: float) -> int:
        """Return how often the ranks and others were late in turn, before the newest parts in which they are late."""
        is_own = True
        turns = 0
        for value, part in zip(lags[before:], self._parts[before:], strict=True):
            is_any_late = any(lag > level for one, lag in part.last.items() if one in rivals)
            if is_any_late and (value > level) != is_own:
                is_own, turns = not is_own, turns + 1
        return turns

    def longest_gap(self, key: Key, level: float) -> float:
        """Return the longest time between two parts with a loss above the level, with others between them."""
        known = (
            (part.ends, value)
            for part, value in zip(self._parts, self.values(key), strict=True)
            if not math.isnan(value)
        )
        above = [(number, ends) for number, (ends, value) in enumerate(known) if value > level]
        gaps = (new - old for (number, new), (following, old) in pairwise(above) if following > number + 1)
        return max(gaps, default=0.0)

    def beyond_late(self, key: Key, kind: str, seconds: float, level: float) -> float | None:
        """Return the mean loss of a run without what ranks explain that are always late; None if it is unknown.

        Then the one that waits least has no wait for others. They may be other ranks in each block of parts that covers
        these seconds and has enough events, which are losses beyond the level.
        """
        parts = [*self._parts, *self._older]
        whole = Span(parts, self._run)
        values = [0.0 if math.isnan(value) else max(value - level, 0.0) for value in whole.values(key)]
        sizes = [*map(mul, values, whole.weights(key[0]))]
        ends = whole._ends(len(self), seconds, sizes, FEW_EVENTS, MANY_EVENTS) or self._ends(len(self), seconds, sizes)
        total = known = 0.0
        for begin, end in pairwise(ends):
            block = Span(parts[begin : min(end, len(self))], self._run)
            mean, ratio = block.mean(key), Span(parts[begin:end], self._run).in_turn(key, kind)
            if mean is not None and not math.isnan(ratio):
                total += block.seconds * mean * ratio
                known += block.seconds
        return total / known if known else None

    def _ends(
        self, count: int, seconds: float, sizes: Sequence[float], few: float = 0.0, many: float = 0.0
    ) -> Sequence[int]:
        """Return the number of parts before each block of the newest parts, and after the last; empty without events.

        A block covers these seconds and has at least a few events; many if it has to be longer for that. The last one
        also has the rest of the newest parts. If it is the only one, it may have older parts.
        """
        ends, covered, total, squares, needed = [0], 0.0, 0.0, 0.0, few
        for end, (part, size) in enumerate(zip(self._parts, sizes, strict=False), start=1):
            covered, total, squares = covered + part.seconds, total + size, squares + size * size
            if covered >= seconds:
                needed = many if chance.events(total, squares) < needed else 0.0
                if not needed:
                    ends.append(end)
                    covered, total, squares, needed = 0.0, 0.0, 0.0, few
            if end >= count and len(ends) > 1:
                return [*ends[:-1], max(end, count)]
        return [0, len(self)] if chance.events(total, squares) >= few else []

    def in_turn(self, key: Key, kind: str) -> float:
        """Return the ratio of a run's loss that no ranks explain which are always late; NaN if it is unknown.

        A difference that the ranks have by chance, if each step is another rank's, explains nothing.
        """
        mean, least = self.mean(key), self.least(kind)
        if mean is None or least is None:
            return math.nan
        by_chance = BY_CHANCE * mean / math.sqrt(max(self.steps, 1.0))
        return least / mean if mean - least > by_chance else 1.0

    def least(self, kind: str) -> float | None:
        """Return the mean wait of the ranks that wait least among their peers, as a mean wait of all but the last.

        A rank whose wait is unknown, as before its restart, does not count. It is None if all are unknown.
        """
        total = 0.0
        for ranks in self._run.peers.groups:
            if len(ranks) > 1:
                waits = self.waits(kind, ranks) or self.waits(kind, self._mostly_known(kind, ranks))
                if not waits:
                    return None
                total += len(ranks) ** 2 / (len(ranks) - 1) * min(waits.values())
        return total / max(sum(map(len, self._run.peers.groups)), 1)

    def _mostly_known(self, kind: str, ranks: Ranks) -> Ranks:
        """Return the ranks whose waits are known in the most parts."""
        known = {rank: sum(map(math.isfinite, self._column(kind, rank))) for rank in ranks}
        return tuple(rank for rank, count in known.items() if count == max(known.values()))

    def rise(self, key: Key, level: float) -> Span:
        """Return the newest parts in which the loss has been above the level.

        They begin where the sum of what exceeds the level is largest, as in Page's CUSUM test: a single part above or
        below the level does not change it.
        """
        total, largest, count = 0.0, -math.inf, 1
        for number, (weight, value) in enumerate(zip(self.weights(key[0]), self.values(key), strict=True), start=1):
            total += 0.0 if math.isnan(value) else weight * (value - level)
            if total >= largest:
                largest, count = total, number
        return self._newest(count)


class Parts:
    """The parts of a run. They are added as they are measured, and merged into longer ones."""

    def __init__(self, level: float, compared: Collection[str] = ()) -> None:
        """Set the lag from which a rank is the last one, and the kinds that are measured in compared steps."""
        self.columns: dict[Column, int] = {}
        self.peers = Peers()
        self.compared = compared
        self._level = level
        self._rivals: Sequence[Sequence[int]] = ()
        self._rings: list[deque[Part]] = [deque(maxlen=CAPACITY) for _ in RESOLUTIONS]
        self._open: list[list[Part]] = [[] for _ in RESOLUTIONS]

    def add(
        self,
        ends: float,
        seconds: float,
        steps: float,
        losses: Mapping[Column, float],
        rivals: Iterable[Iterable[Column]] = (),
        compared: float | None = None,
    ) -> None:
        """Add the newest part. Rivals are the waits of ranks that are compared with each other."""
        for column in losses:
            self.columns.setdefault(column, len(self.columns))
        groups = [[column for column in columns if column in losses] for columns in rivals]
        self._rivals = [[self.columns[column] for column in columns] for columns in groups]
        self.peers.groups = [tuple(rank for _, rank in columns if rank is not None) for columns in groups]
        values = array("d", [math.nan]) * len(self.columns)
        for column, loss in losses.items():
            values[self.columns[column]] = loss
        compared = seconds if compared is None else compared
        self._add(Part(ends, seconds, steps, values, compared, self._last(values)))

    def forget(self, ranks: Collection[int]) -> None:
        """Make the losses of these ranks unknown."""
        numbers = [number for (_, rank), number in self.columns.items() if rank in ranks]
        for part in chain(*self._rings, *self._open):
            for number in numbers:
                if number < len(part.values):
                    part.values[number] = math.nan

    def _add(self, part: Part) -> None:
        for ring, waiting, resolution in zip(self._rings, self._open, RESOLUTIONS, strict=True):
            waiting.append(part)
            if sum(one.seconds for one in waiting) >= resolution:
                ring.append(self._merge(waiting))
                waiting.clear()

    def span(self, seconds: float, least: int = 1) -> Span | None:
        """Return the newest parts that cover the time; None if there are too few yet.

        Choose the longest parts of which eight fit into the time, so that every part contains what happens once in a
        few steps.
        """
        parts = [*reversed(self._fitting(seconds))]
        covered = accumulate(part.seconds for part in parts)
        count = next((count for count, one in enumerate(covered, start=1) if one >= seconds and count >= least), None)
        return Span(parts[:count], self, parts[count:]) if count else None

    def _fitting(self, seconds: float) -> Sequence[Part]:
        fitting = (ring for ring, long in zip(self._rings, RESOLUTIONS, strict=True) if FITTING * long <= seconds)
        *_, longest = fitting
        return longest

    def lasting(self, key: Key, allowance: float) -> Iterator[Lasting]:
        """Yield how long a loss beyond the allowance has lasted, from short to long spans."""
        for ring in self._rings:
            if ring:
                yield from Span([*reversed(ring)], self).lasting(key, allowance)

    def longest_gap(self, key: Key, level: float, since: float) -> float:
        """Return the longest time between two parts with a loss above the level, with others between them.

        Parts of any resolution count: long parts may all have what happens each minute.
        """
        newest = ([part for part in reversed(ring) if part.ends > since] for ring in self._rings)
        spans = (Span(parts, self) for parts in newest if parts)
        return max((span.longest_gap(key, level) for span in spans), default=0.0)

    def _last(self, values: Sequence[float]) -> Mapping[int, float]:
        """Return the column and the lag of the last rank of each group, if it is late."""
        last = {min(of, key=values.__getitem__): max(map(values.__getitem__, of)) for of in self._rivals if of}
        return {one: most - values[one] for one, most in last.items() if most - values[one] > self._level}

    def _merge(self, parts: Sequence[Part]) -> Part:
        if len(parts) == 1:
            return parts[0]
        seconds, compared = [part.seconds for part in parts], [part.compared for part in parts]
        columns = zip_longest(*(part.values for part in parts), fillvalue=math.nan)
        values = array(
            "d",
            (
                _mean(compared if kind in self.compared else seconds, column)
                for (kind, _), column in zip(self.columns, columns, strict=False)
            ),
        )
        steps = sum(part.steps for part in parts)
        return Part(parts[-1].ends, sum(seconds), steps, values, sum(compared), self._last(values))


def _mean_of(values: array[float], columns: Sequence[int]) -> float:
    """Return the mean of these columns; NaN if one is unknown."""
    if not columns or max(columns) >= len(values):
        return math.nan
    return sum([values[column] for column in columns]) / len(columns)


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return the weighted mean of the known values; NaN if none is known."""
    total: float = sum(map(mul, weights, values))
    whole = sum(weights)
    if whole and not math.isnan(total):
        return total / whole
    known = [(weight, value) for weight, value in zip(weights, values, strict=True) if not math.isnan(value)]
    sums = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / sums if sums else math.nan


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the median of values with weights, or 0 without values."""
    known = sorted(weighted)
    half = sum(weight for _, weight in known) / 2
    reached = accumulate(weight for _, weight in known)
    return next((value for (value, _), weight in zip(known, reached, strict=True) if weight >= half), 0.0)
