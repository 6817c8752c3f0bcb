"""The plan of a soak is drawn from a seed and is complete."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from validation.gauntlet.cases import all_cases
from validation.soak import plan

TWO_HOURS = 7200.0
SEEDS = range(1, 6)


@pytest.mark.parametrize("run", plan.RUNS)
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_a_run_leave_time_for_the_resolve(seed, run):
    slots = list(plan.faults(seed, run, TWO_HOURS))
    assert slots == list(plan.faults(seed, run, TWO_HOURS))
    assert len(slots) >= 8
    assert all(later.at - earlier.until >= plan.BETWEEN for earlier, later in pairwise(slots))
    assert slots[-1].until + plan.BETWEEN <= TWO_HOURS
    assert plan.FULL_AT_START in [slot.name for slot in slots]


@pytest.mark.parametrize("run", plan.RUNS)
def test_every_fault_is_one_of_the_gauntlet_on_that_kind_of_device(run):
    assert all(run in all_cases()[name].devices for name in plan.FAULTS[run])


@pytest.mark.parametrize("seed", SEEDS)
def test_each_disturbance_happens_twice_and_none_overlap(seed):
    found = list(plan.chaos(seed, TWO_HOURS))
    assert all(later.at >= earlier.at + earlier.seconds for earlier, later in pairwise(found))
    counts = Counter((one.act, one.target) for one in found)
    assert len(counts) == 12
    assert min(counts.values()) >= 2


def test_no_exporter_is_down_long_enough_to_alert():
    assert max(plan.DOWN[1], plan.STOPPED[1], plan.SLOW_FOR) < 120
