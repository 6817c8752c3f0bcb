"""The set of ranks that are late together: they wait least, and a gap separates their waits from the others'."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

Ranks = tuple[int, ...]
"""The ranks of a set, in order."""
LEVEL = 0.5
"""Ratio of the largest gap from which a smaller one separates ranks as well: the set ends at the first of them."""
DOMINANT = 0.6
"""Ratio of the range of the waits that the gap of each further set has to exceed: of steady levels, such as the waits
3:2:1:0 of a causal mask, only the slowest is a set."""


def late_sets(waits: Mapping[int, float], loss: float, cost: float, known: Collection[int] = ()) -> Iterator[Ranks]:
    """Yield the late sets, the latest first. `waits` are the mean waits of ranks that do the same work.

    The others of a set wait longer by more than `loss`, and that is more than `cost` as a mean over all ranks. Ranks
    that are known to be late are left out.
    """
    left = sorted((rank for rank in waits if rank not in known), key=waits.__getitem__)
    is_first = len(left) == len(waits)
    while len(left) > 1:
        values = [waits[rank] for rank in left]
        gaps = [(following - value, count) for count, (value, following) in enumerate(pairwise(values), start=1)]
        costly = [
            gap for gap, lag in zip(gaps, _lags(values), strict=True) if _is_costly(lag, gap[1], left, loss, cost)
        ]
        largest = max((gap for gap, _ in costly), default=0.0)
        if largest <= 0.0 or not (is_first or largest > DOMINANT * (values[-1] - values[0])):
            return
        count = next(count for gap, count in costly if gap >= LEVEL * largest)
        yield tuple(sorted(left[:count]))
        left, is_first = left[count:], False


def _lags(values: Sequence[float]) -> Iterator[float]:
    """Yield for each split how much longer the others wait on average. The values are in order."""
    *sums, total = accumulate(values)
    for count, waited in enumerate(sums, start=1):
        yield (total - waited) / (len(values) - count) - waited / count


def _is_costly(lag: float, count: int, ranks: Sequence[int], loss: float, cost: float) -> bool:
    return lag > loss and lag * (len(ranks) - count) / len(ranks) > cost
