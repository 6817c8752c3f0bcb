"""The counters of lost GPU time are bounded for any names of phases."""

from __future__ import annotations

from rankscope_exporter.ledger.account import CAUSES_LIMIT, add_seconds
from rankscope_exporter.ranks.judged_runs import CAUSES


def test_phases_beyond_a_limit_are_counted_as_other() -> None:
    seconds = dict.fromkeys(CAUSES, 0.0)
    for number in range(1000):
        add_seconds(seconds, {f"phase-{number}": 1.0, "transfer": 1.0})
    assert len(seconds) == CAUSES_LIMIT
    assert seconds["transfer"] == 1000.0
    assert sum(seconds.values()) == 2000.0
