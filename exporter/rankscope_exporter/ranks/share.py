"""The choice of ranks on a page: the page's bytes are limited, and each owner has the same share.

A page is counted in ordinary ranks. A rank with long names, or with many phases and groups, counts as several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain

from rankscope.record.layout import FIELDS, INDEX
from rankscope.record.listing import take_turns
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.principals import principal
from rankscope_exporter.ranks.rank import Key, Rank

RANKS_LIMIT = 128  # ordinary ranks on a page
OWNER_RANKS_LIMIT = 96  # ranks of one owner
STAYING_LIMIT = 16  # as many as a node has GPUs
ORDINARY_BYTES = 32_768  # bytes of an ordinary rank: 100 series take 13,000, all possible series 21,000
# Tests check these: series of a rank without operations, own phases, groups or trackers, and bytes of a series without
# the names in it.
BARE_SERIES = 155
LINE = 140
# Series for each phase and group that a record names, and each operation that it counts.
SERIES_OF_PHASE = 5
SERIES_OF_GROUP = 3
SERIES_OF_OP = 5
_BY_OP = slice(INDEX["collectives"], INDEX["collective_bus_bytes"] + FIELDS["collective_bus_bytes"])


class TextLimit:
    """The most bytes that the lines of ranks with this info take on a page."""

    def __init__(self, snapshot: RankSnapshot) -> None:
        info = snapshot.info
        self._line = line = LINE + _length(info["run"])
        optional = [info.get(name, {}).values() for name in ("settings", "tracker_ids", "tracker_urls")]
        labels = (*(info[label] for label in LABELS), *chain.from_iterable(optional))
        self._named = (
            (BARE_SERIES + len(info.get("tracker_ids", ()))) * line
            + sum(SERIES_OF_PHASE * (line + _length(phase)) for phase in info.get("phases", ()))
            + sum(SERIES_OF_GROUP * (line + _length(group)) for group in snapshot.groups)
            + sum(40 + _length(label) for label in labels)
            + sum(45 + _length(value) for value in info.get("labels", {}).values())
        )

    def of(self, snapshot: RankSnapshot) -> int:
        """Return the most bytes that this rank takes."""
        by_op = snapshot.slots[_BY_OP]
        return self._named + (len(by_op) - by_op.count(0.0)) * self._line

    def weight(self, snapshot: RankSnapshot) -> int:
        """Return the number of ordinary ranks that this rank counts as."""
        return 1 + self.of(snapshot) // ORDINARY_BYTES


def _length(text: str) -> int:
    """Return the bytes of a text on a page: UTF-8, with quotes and backslashes escaped."""
    return len(text.encode(errors="surrogatepass")) + text.count('"') + text.count("\\")


def fair_page(
    ranks: Iterable[Rank], shown: Collection[Key], limit: int = RANKS_LIMIT, owner_limit: int = OWNER_RANKS_LIMIT
) -> list[Rank]:
    """Return the ranks that fit: one of each owner in turn, living ranks first, then ranks that were `shown`.

    The first living ranks of each owner that were shown stay, however many owners come.
    """
    ordered = sorted(ranks, key=lambda rank: _order(rank, shown))
    take = partial(take_turns, weight=lambda rank: rank.weight, principal=principal)
    staying = take((rank for rank in ordered if rank.snapshot.alive and rank.key in shown), STAYING_LIMIT)
    page, room = [], limit
    for rank in {rank.key: rank for rank in (*staying, *take(ordered, owner_limit))}.values():
        if rank.weight <= room:
            room -= rank.weight
            page.append(rank)
    return page


def _order(rank: Rank, shown: Collection[Key]) -> tuple[bool, bool, float]:
    return not rank.snapshot.alive, rank.key not in shown, -rank.snapshot.unix_field("started_unix")
