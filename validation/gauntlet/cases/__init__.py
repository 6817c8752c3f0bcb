"""All faults and decoys by name. The number in a fault's name is its number in the list of faults."""

from __future__ import annotations

from functools import cache

from validation.gauntlet.case import Case
from validation.gauntlet.cases import compute, data, ends, network, node
from validation.gauntlet.cases.decoys import DECOYS


@cache
def all_cases() -> dict[str, Case]:
    """Return the faults and then the decoys, each sorted by name: a seed shuffles this order."""
    faults = {**data.FAULTS, **compute.FAULTS, **network.FAULTS, **ends.FAULTS, **node.FAULTS}
    return dict(sorted(faults.items())) | dict(sorted(DECOYS.items()))
