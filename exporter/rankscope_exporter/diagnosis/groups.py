"""The group with a slow link, among groups of ranks that do the same work, such as a mesh's tensor-parallel groups.

In a group with a slow rank, that rank waits least. If even the rank that waits least waits longer than in other groups
of the same shape, no rank of the group is late: the transfer between them is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from rankscope.record.group_name import members
from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts

Shape = tuple[tuple[int, int | None], ...]
"""The distances of a group's ranks from its first, with their pipeline stages, which do different work.

The distances are 0 and 1 for each of 0-1 and 2-3, 0 and 2 for each of 0,2 and 1,3.
"""


class SlowGroup(NamedTuple):
    """A group and its least wait, the wait of the rank that waits least in it, as a ratio of the time."""

    name: str
    wait: float
    peers_wait: float
    """The median least wait of the other groups of its shape."""

    @property
    def excess(self) -> float:
        """Return the ratio of the time that the run would save if the group were like the others."""
        return self.wait - self.peers_wait


def slowest(run: RunFacts) -> SlowGroup | None:
    """Return the group whose least wait exceeds that of other groups of its shape most. None without such groups."""
    found = []
    for waits in _by_shape(run).values():
        name = max(waits, key=waits.__getitem__)
        others = [wait for other, wait in waits.items() if other != name]
        if others:
            found.append(SlowGroup(name, waits[name], median(others)))
    return max(found, key=lambda group: group.excess, default=None)


def _by_shape(run: RunFacts) -> Mapping[Shape, Mapping[str, float]]:
    """Return the least wait of each group by shape, without groups that have a rank on another node."""
    here = {one.rank: one for one in run.ranks}
    shapes: dict[Shape, dict[str, float]] = defaultdict(dict)
    for name in {name for one in run.ranks for name in one.spent.collectives.group_waits}:
        ranks = members(name)
        if 1 < len(ranks) <= len(here) and all(rank in here for rank in ranks):
            shape = tuple((rank - ranks[0], here[rank].now.stage) for rank in ranks)
            shapes[shape][name] = min(_wait(here[rank], name) for rank in ranks)
    return shapes


def _wait(one: RankFacts, group: str) -> float:
    """Return the wait of a rank in a group, as a ratio of the time, by the clock that its peers are compared by."""
    collectives = one.spent.collectives
    if one.device_scale:
        return collectives.device_group_waits.get(group, 0.0) * one.device_scale
    return collectives.group_waits.get(group, 0.0) / one.seconds
