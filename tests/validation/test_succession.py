"""The programs about faults in succession: what counts as right, and what is read from each view."""

from __future__ import annotations

import pytest
from testing.readings import HOST
from validation import succession
from validation.new_user import HANG, LATE_DATA, NOT_YET, _is_right, found
from validation.succession import Scene, play


@pytest.fixture(autouse=True)
def young_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "TRAINS_FOR", 60.0)


def test_a_scene_is_right_if_each_fault_has_its_own_finding() -> None:
    line = play(Scene("data_wait", "other", True, 10, 2, HOST))
    assert line["found"] == ["straggler data_wait rank 1", "straggler other rank 1"]
    assert line["wrong"] == []


def test_a_scene_is_wrong_if_a_fault_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "LASTS", 4.0)
    assert play(Scene("optimizer", "backward", True, 40, 2, HOST))["wrong"] == ["found nothing"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Rank 1 (vm, GPU 1) slows down run train by\n41%: its data is late\nCheck", LATE_DATA),
        (
            "│ Rank 0 (vm) slows down run train by 3.4%: slow computation in backward │",
            "rank 0, slow computation in backward",
        ),
        ("Not yet an alert: Run train hangs: Rank 1 (vm, GPU 1) is stuck in other (time)", NOT_YET + HANG),
        ("CRITICAL: Rank 1 (vm) of run train was killed", "rank 1 was killed"),
        ("No alert yet: no rank has made progress for 15 s.", NOT_YET + "no rank has made progress"),
        (
            "The ranks of run train slow each other down in turn by 30%",
            "The ranks of run train slow each other down in turn",
        ),
    ],
)
def test_problems_are_read_from_the_words_of_each_view(text: str, said: str) -> None:
    assert found(text) == [said]


def test_only_the_report_has_earlier_problems() -> None:
    earlier = [LATE_DATA, HANG]
    assert _is_right("report", earlier, "", earlier)
    assert not _is_right("page", [LATE_DATA], "", earlier)
    assert not _is_right("page", [LATE_DATA], NOT_YET + HANG, earlier)
    assert _is_right("page", [NOT_YET + HANG], NOT_YET + HANG, earlier)
