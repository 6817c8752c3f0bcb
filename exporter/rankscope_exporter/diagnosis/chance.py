"""Probabilities that a loss is a matter of chance: by its deviation, and by the number of its events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import NormalDist

ALTERNATIVES = 8
"""The number of places at which a single event may be seen by chance: eight ranks, or eight parts of the time."""
ROUNDING = 1e-9


def steadiness(weighted: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Yield for each value, with those before it, the probability that their mean is above 0 by chance.

    Values and weights are given in pairs. It is that of Student's t, transformed to a normal deviate as by Wallace
    (Bounds on normal approximations to Student's and the chi-square distributions, 1959).
    """
    weights = squares = total = linear = quadratic = 0.0
    for weight, value in weighted:
        weights, total = weights + weight, total + weight * value
        square = weight * weight
        squares, linear, quadratic = squares + square, linear + square * value, quadratic + square * value * value
        freedom = weights * weights / squares - 1.0 if squares else 0.0
        if freedom < 1.0 or total <= 0.0:
            yield 1.0
            continue
        mean = total / weights
        deviations = max(quadratic - 2.0 * mean * linear + mean * mean * squares, (ROUNDING * total) ** 2)
        t_square = total * total * freedom / (freedom + 1.0) / deviations
        deviate = math.sqrt(freedom * math.log1p(t_square / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
        yield NormalDist().cdf(-deviate)


def events(total: float, squares: float) -> float:
    """Return how many events of equal size a loss has, from the sums of their sizes and of the squares (Kish)."""
    return total * total / squares if squares else 0.0


def of_one_place(number: float, places: float = ALTERNATIVES) -> float:
    """Return the probability that so many events are all at the same one of the places."""
    return min(math.pow(places, 1.0 - number), 1.0)


def of_most(own: float, all_events: float, late: int, ranks: int) -> float:
    """Return a bound of the probability that any set of so many late ranks has so many of all events (Chernoff)."""
    share, by_chance = own / all_events if all_events else 0.0, late / ranks
    if share <= by_chance:
        return 1.0
    entropy = share * math.log(share / by_chance)
    if share < 1.0:
        entropy += (1.0 - share) * math.log((1.0 - share) / (1.0 - by_chance))
    return min(math.comb(ranks, late) * math.exp(-all_events * entropy), 1.0)
