"""Ranks that ended as if they were done, before others failed because of that: their connection to the rank broke.

A rank has left if its process finished, also by `sys.exit(0)` or `os._exit(0)`, if it has destroyed its process group,
or if SIGTERM or Ctrl-C ended it. None of these is a failure by itself: all ranks of a healthy run end so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.standstill import FINISHED, GOES_ON, ranks_behind

STOPPED_BY = ("sigterm", "interrupted")
"""Ends that a scheduler, a launcher or a user has asked for."""
DIRECT = 64
"""The most failed ranks whose collectives are compared, the first ones: they waited for the rank that left."""
Alive = Mapping[int, RankReading]
"""Each rank's last reading while it was alive."""


def reason_of(one: RankReading) -> str:
    """Return how a rank ended; `finished` if it has left its group, whatever happened to its process after that."""
    return FINISHED if one.has_left else one.ended.reason if one.ended else ""


def ended_at(one: RankReading) -> float:
    """Return when a rank ended."""
    return one.ended.at if one.ended else one.at


def has_lost_peer(one: RankReading) -> bool:
    """Return whether a rank failed because its connection to another rank broke."""
    return bool(one.ended and one.ended.has_lost_peer)


def is_before(one: RankReading, failed: RankReading, alive: Alive, margin: float = 0.0) -> bool:
    """Return whether a rank is known to have ended before another one failed.

    A killed one was then seen alive, `margin` seconds later.
    """
    error = 0.0 if one.node == failed.node else one.clock_error + failed.clock_error
    if reason_of(failed) == "killed":
        last = alive.get(failed.rank)
        return last is not None and last.began == failed.began and last.at - ended_at(one) > error + margin
    return ended_at(failed) - ended_at(one) >= error


def find_departed(ranks: Sequence[RankReading], failed: Sequence[RankReading], alive: Alive) -> list[RankReading]:
    """Return the ranks that left before the first of `failed`, which needed them. `ranks` are all others."""
    left = [*_left_before(ranks, failed, alive)]
    finished = [one for one in left if reason_of(one) == FINISHED]
    has_lost = any(map(has_lost_peer, failed))
    behind = ranks_behind(sorted(failed, key=ended_at)[:DIRECT], finished) if finished else ()
    early = [one for one in finished if one.rank in behind and (has_lost or _is_first(one, failed, alive))]
    if not early and has_lost and len(finished) == 1:  # it may have left within a collective
        early = [one for one in finished if _is_first(one, failed, alive)]
    stopped = [one for one in left if reason_of(one) in STOPPED_BY and _is_first(one, failed, alive)]
    return early + stopped


def _is_first(one: RankReading, failed: Collection[RankReading], alive: Alive) -> bool:
    return all(is_before(one, other, alive) for other in failed)


def _left_before(ranks: Sequence[RankReading], failed: Sequence[RankReading], alive: Alive) -> Iterator[RankReading]:
    """Yield the ranks that have left, unless the others started or went on for long after that."""
    progress = max(alive.get(one.rank, one).last_progress for one in failed)
    began = max(one.began for one in failed)
    for one in ranks:
        has_left = reason_of(one) in (FINISHED, *STOPPED_BY)
        if has_left and began < ended_at(one) and progress - ended_at(one) < GOES_ON:
            yield one
