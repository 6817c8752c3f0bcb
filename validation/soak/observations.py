"""What a soak has observed: a line of the ledger for each observation, written at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from testing.report import Ledger, Line

Observation = Line


class Observations:
    """Adds observations to a ledger, with the time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def add(self, kind: str, **what: Any) -> None:
        """Write one observation."""
        self._ledger.add({"kind": kind, "time": round(time.time(), 3), **what})


def by_kind(ledger: Ledger) -> Mapping[str, Sequence[Observation]]:
    """Return all observations by kind, in their order."""
    found: dict[str, list[Observation]] = defaultdict(list)
    for line in ledger.lines:
        found[line["kind"]].append(line)
    return found
