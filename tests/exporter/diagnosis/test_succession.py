"""Faults of one rank in succession: each is a finding with its own cause, and none stays open after its end."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from testing.readings import DEVICE, HOST, SLOW, Change, Training, Trial, Work, drift, hang, spend

FAULTS = {phase: spend(phase, 0.12, 1) for phase in ("data_wait", "backward", "other")}


@pytest.mark.parametrize(("gap", "clock"), [(0, HOST), (10, DEVICE), (40, HOST)])
@pytest.mark.parametrize(("first", "second"), list(permutations(FAULTS, 2)))
def test_a_second_fault_of_the_same_rank_is_a_finding_with_its_own_cause(
    first: str, second: str, gap: int, clock: str
) -> None:
    trial = Trial(Training(2, clock=clock))
    trial.train(60, drift)
    trial.train(40, drift, FAULTS[first])
    trial.train(gap, drift)
    onset = trial.training.now
    trial.train(40, drift, FAULTS[second])
    last = trial.train(60, drift)
    findings = trial.opened()
    assert [finding.candidate.cause for finding in findings] == [first, second]
    assert findings[1].since >= onset - 8.0
    assert trial.kinds() == {"straggler"}
    assert not last.findings


@pytest.mark.parametrize("gap", [0, 10])
def test_the_same_fault_that_returns_soon_is_still_the_same_finding(gap: int) -> None:
    trial = Trial(Training(2)).trained(60, drift).trained(40, drift, FAULTS["other"])
    trial.trained(gap, drift).train(40, drift, FAULTS["other"])
    assert len(trial.opened()) == 1


def test_a_small_lag_with_another_cause_does_not_go_on_as_a_finding() -> None:
    trial = Trial(Training(2)).trained(60, drift).trained(40, drift, FAULTS["data_wait"])
    last = trial.train(40, drift, spend("other", 0.017, 1))
    assert [finding.candidate.cause for finding in trial.opened()] == ["data_wait"]
    assert not last.findings


def test_a_rank_whose_forward_and_backward_are_slow_has_one_finding() -> None:
    slow_forward, slow_backward = spend("forward", 0.05, 1), spend("backward", 0.07, 1)
    trial = Trial(Training(4)).trained(60, drift).trained(40, drift, slow_forward)
    trial.train(60, drift, slow_forward, slow_backward)
    assert [finding.candidate.cause for finding in trial.opened()] == ["forward"]


def test_evidence_of_a_finding_is_never_negative() -> None:
    trial = Trial(Training(2)).trained(60, drift).trained(40, drift, FAULTS["data_wait"])
    trial.train(60, drift, FAULTS["backward"])
    found = [finding.candidate.evidence["excess"] for verdict in trial.verdicts for finding in verdict.findings]
    assert min(found) > 0.0


def late_in_turn(phase: str, seconds: float, often: float = 1.0) -> Change:
    """Make one of two ranks spend more time in a phase, in each step a random one and a random time."""

    def change(step: int, rank: int, work: Work) -> None:
        drawn = random.Random(f"0-{step}")
        if rank == (drawn.random() < 0.5) and drawn.random() < often:
            work[phase] = work.get(phase, 0.0) + drawn.expovariate(1 / seconds)

    return change


@pytest.mark.parametrize("clock", [HOST, DEVICE])
@pytest.mark.parametrize(
    ("late", "fault"),
    [
        (late_in_turn("other", 0.028), "data_wait"),
        (late_in_turn("other", 0.028), "backward"),
        (late_in_turn("data_wait", 0.028), "backward"),
    ],
    ids=["other data_wait", "other backward", "data_wait backward"],
)
def test_a_fault_of_one_rank_does_not_make_ranks_late_in_turn(late: Change, fault: str, clock: str) -> None:
    trial = Trial(Training(2, clock=clock)).trained(90, late)
    assert not trial.kinds()
    trial.train(60, late, spend(fault, 0.2, 1))
    last = trial.train(60, late)
    assert [finding.candidate.cause for finding in trial.opened()] == [fault]
    assert trial.kinds() == {"straggler"}
    assert not last.findings


def test_ranks_that_are_late_one_after_the_other_are_not_late_in_turn() -> None:
    trial = Trial(Training(2)).trained(60, drift)
    for rank in (0, 1, 0, 1):
        trial.train(20, drift, spend("other", 0.12, rank))
    assert trial.kinds() == {"straggler"}


@pytest.mark.parametrize("phase", ["data_wait", "h2d_copy"])
@pytest.mark.parametrize("clock", [HOST, DEVICE])
def test_the_same_fault_of_one_rank_after_the_other_is_none_of_the_whole_run(phase: str, clock: str) -> None:
    trial = Trial(Training(2, clock=clock)).trained(60, drift)
    trial.trained(40, drift, spend(phase, 0.12, 1)).train(40, drift, spend(phase, 0.12, 0))
    assert trial.kinds() == {"straggler"}


def test_ranks_that_are_late_in_turn_are_no_longer_when_one_of_them_is_always_late() -> None:
    late = late_in_turn("h2d_copy", 0.08)
    trial = Trial(Training(2)).trained(60, late)
    (before,) = trial.opened("rotating_straggler")
    last = trial.train(60, late, spend("backward", 0.6, 1))
    assert [finding.kind for finding in last.findings] == ["straggler"]
    assert not any(pending.candidate.kind == "rotating_straggler" for pending in last.pending)
    ratios = [
        one.candidate.ratio for verdict in trial.verdicts for one in verdict.findings if one.opened == before.opened
    ]
    assert max(ratios) < 0.5


@pytest.mark.parametrize("clock", [HOST, DEVICE])
def test_a_finding_begins_when_its_loss_passes_the_limit(clock: str) -> None:
    trial = Trial(Training(2, clock=clock)).trained(80, spend("other", 0.02, 1))
    assert not trial.kinds()
    onset = trial.training.now
    trial.train(30, spend("backward", 0.2, 1))
    (finding,) = trial.opened()
    assert abs(finding.since - onset) <= 1.0
    assert finding.candidate.ratio == pytest.approx(0.2 / 0.41, rel=0.2)


def test_a_loss_above_the_limit_counts_although_single_parts_are_below_it() -> None:
    trial = Trial(Training(4)).trained(60, drift)
    onset = trial.training.now
    seconds, finding = trial.find(drift, spend("backward", 0.3, 1, every=2))
    assert finding is not None
    assert abs(finding.since - onset) <= 2.0 < seconds


@pytest.mark.parametrize("clock", [HOST, DEVICE])
@pytest.mark.parametrize("fault", ["data_wait", "backward"])
def test_a_finding_about_steps_is_not_shown_while_no_rank_makes_progress(fault: str, clock: str) -> None:
    trial = Trial(Training(2, clock=clock)).trained(60, drift)
    assert trial.train(40, spend(fault, 0.12, 1)).findings
    for verdict in [trial.train(1, hang("other", 1)) for _ in range(60)][8:]:
        assert {one.kind for one in verdict.findings} <= {"hang"}
        shown = {one.candidate.kind for one in verdict.pending if one.lacks != "explained"}
        assert verdict.findings or shown == {"hang"}
    assert [one.kind for one in trial.verdicts[-1].findings] == ["hang"]


def test_a_finding_is_shown_again_after_a_pause_that_is_no_hang() -> None:
    trial = Trial(Training(2)).trained(60, drift).trained(40, SLOW)
    trial.train(1, spend("other", 15.0, 1))
    trial.train(30, SLOW)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["straggler"]
    assert len(trial.opened()) == 1


def test_long_steps_do_not_hide_what_is_found_in_them() -> None:
    trial = Trial(Training(2)).trained(200, spend("forward", 2.0), spend("data_wait", 9.0, 1))
    (finding,) = trial.opened()
    opened = [verdict for verdict in trial.verdicts if verdict.at >= finding.opened]
    assert all(verdict.findings for verdict in opened)


def test_a_hang_that_ends_leaves_no_straggler_open() -> None:
    trial = Trial(Training(2)).trained(60, drift).trained(40, drift, SLOW)
    trial.train(1, spend("other", 120.0, 1))
    while not any(one.kind == "hang" for one in trial.train(1, drift).findings):
        pass
    while any(one.kind == "hang" for one in trial.train(1, drift).findings):
        pass
    assert not trial.verdicts[-1].findings
    trial.train(60, drift)
    assert not any(verdict.findings for verdict in trial.verdicts[-60:])
    assert {one.kind for one in trial.train(20, drift, SLOW).findings} == {"straggler"}
