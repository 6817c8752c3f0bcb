"""Faults of one rank in succession: each is a finding with its own cause, and none stays open after its end."""

from __future__ import annotations

from itertools import permutations

import pytest
from testing.readings import DEVICE, HOST, Training, Trial, drift, spend

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
