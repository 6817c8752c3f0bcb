"""The same readings on one node, and split over several: the same findings, whatever the nodes' clocks show."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.analyzed_job import AnalyzedJob, as_words
from testing.judged_job import JudgedJob
from testing.simulated_job import COMPUTE, DELAY, Durations, Plan, even, lagging, rotating

HOUR = 3600.0
LONG = {"forward": COMPUTE, "backward": 3 * COMPUTE}


def slow_transfer(_step: int, rank: int) -> Durations:
    return {**even(_step, rank), "collective_wait": DELAY}


def slow_half(step: int, rank: int) -> Durations:
    return {**even(step, rank), "forward": COMPUTE if rank > 1 else COMPUTE / 4}


def long_steps(step: int, rank: int) -> Durations:
    return {**LONG, "backward": LONG["backward"] + (DELAY * 2 if rank == 1 else 0.0)}


PLANS: dict[str, Plan] = {
    "a rank is late": lagging("data_wait", laggard=1),
    "all ranks are late in turn": rotating,
    "the network is slow": slow_transfer,
    "half of the ranks are slow": slow_half,
    "no step is sampled": long_steps,
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("nodes", [2, 4])
def test_the_findings_are_the_same_on_one_node_and_on_several(
    run_dir: Path, tmp_path: Path, name: str, nodes: int
) -> None:
    one = JudgedJob(run_dir).trained(30).trained(30, PLANS[name])
    split = AnalyzedJob(tmp_path / "split", nodes, ahead=[0.0, HOUR, -HOUR, 7.0][:nodes]).train(30)
    assert not split.findings()
    split.train(30, PLANS[name])
    expected = [finding for verdict in one.look.judged.verdicts for finding in verdict.findings]
    found = split.findings()
    assert expected
    assert [finding.kind for finding in found] == [finding.kind for finding in expected]
    for alone, joined in zip(map(as_words, expected), map(as_words, found), strict=True):
        assert joined[:3] == alone[:3]
        assert joined[3].ranks == alone[3].ranks
    ratios = [finding.candidate.ratio for finding in found]
    assert ratios == pytest.approx([finding.candidate.ratio for finding in expected], abs=0.01)


def test_compared_steps_are_the_same_on_one_node_and_on_several(run_dir: Path, tmp_path: Path) -> None:
    one = JudgedJob(run_dir).trained(30, long_steps)
    split = AnalyzedJob(tmp_path / "split").train(30, long_steps)
    (run,) = split.diagnosis.look.readings
    alone = {reading.rank: reading.counters.aligned for reading in one.look.readings[run]}
    for reading in split.diagnosis.look.readings[run]:
        joined, expected = reading.counters.aligned, alone[reading.rank]
        ratio = joined.steps / expected.steps
        assert 0.8 <= ratio <= 1.0
        assert joined.wait_floor == pytest.approx(ratio * expected.wait_floor, rel=0.001)
        assert joined.skew == pytest.approx(ratio * expected.skew, rel=0.001, abs=1e-4)
        assert joined.blame["backward"] == pytest.approx(ratio * expected.blame["backward"], rel=0.001)
