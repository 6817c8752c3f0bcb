"""Wrong verdicts that are known and not mended yet. A test that begins to pass fails here: move it to its subject."""

from __future__ import annotations

import math
import random

import pytest
from testing.readings import Change, Training, Trial, Work, counting, drift, spend

pytestmark = pytest.mark.xfail(strict=True, reason="known and not mended")


def found(training: Training, *changes: Change, within: float, healthy: float = 60.0) -> set[str]:
    """Return the kinds of the findings in a time after healthy training."""
    trial = Trial(training).trained(healthy, drift)
    trial.verdicts.clear()
    return trial.trained(within, drift, *changes).kinds()


@pytest.mark.parametrize(
    "faults",
    [(spend("backward", 0.12, 1, 2),), (spend("backward", 0.12, 1), spend("data_wait", 0.12, 2))],
    ids=["one fault", "two faults"],
)
def test_two_slow_ranks_of_three_are_found(faults) -> None:
    assert found(Training(3), *faults, within=120.0)


def test_uneven_work_with_moderately_long_steps_is_not_called_spikes() -> None:
    """Steps take 0.24 s or 0.51 s: 2.1 times the median. Uneven work alerts only beyond `uneven_allowance`."""
    draw = random.Random(2)

    def uneven(_step: int, _rank: int, work: Work) -> None:
        work["backward"] += 0.03 + (0.27 if draw.random() < 0.05 else 0.0)

    assert not Trial(Training(4)).trained(100, uneven).kinds()


def test_a_notebook_after_a_backward_pass_does_not_hang_in_its_start_up() -> None:
    trial = Trial(Training(1, startup=math.inf, adjust=lambda one: counting(one, micro_steps=1.0)))
    assert not trial.trained(700).kinds()
