"""A finding is scored as a notification that came when it was first seen."""

from __future__ import annotations

from validation.gauntlet.case import Target
from validation.gauntlet.cases import all_cases
from validation.gauntlet.findings import scored

ONSET = 1000.0
FAULT = all_cases()["f03_slow_loader"], Target(rank=2)


def score(rank: str) -> tuple[bool, bool, float]:
    """Return for a finding about a rank whether it is found, whether its place is right, and its seconds."""
    labels = {"kind": "straggler", "rank": rank, "cause": "data_wait", "run": "train"}
    (verdict,) = scored([(labels, ONSET + 7)], [FAULT], ONSET)["verdicts"]
    return verdict["fired"], verdict["place_right"], verdict["seconds"]


def test_a_finding_in_the_right_place_is_right() -> None:
    assert score("2") == (True, True, 7.0)


def test_the_place_of_a_finding_in_another_place_is_wrong() -> None:
    assert score("1") == (True, False, 7.0)
