"""The counters of lost GPU time: bounded, whatever a script calls its phases."""

from __future__ import annotations

from rankscope_exporter.ranks.accounts import CAUSES_LIMIT, add_seconds
from rankscope_exporter.ranks.collectors.findings import CAUSES


def test_phases_that_are_renamed_again_and_again_are_other_beyond_a_limit() -> None:
    seconds = dict.fromkeys(CAUSES, 0.0)
    for number in range(1000):
        add_seconds(seconds, {f"phase-{number}": 1.0, "transfer": 1.0})
    assert len(seconds) == CAUSES_LIMIT
    assert seconds["transfer"] == 1000.0
    assert sum(seconds.values()) == 2000.0
