"""Pipelines: a stage with more work, a slow rank within a stage, and too few micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from testing.readings import RUN

from rankscope_exporter.diagnosis.detectors import late, network, pipeline, small_collectives
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.facts import compare
from rankscope_exporter.diagnosis.lost import lost
from rankscope_exporter.diagnosis.readings import CollectiveCounters, Counters, RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

IMBALANCE, BUBBLE = pipeline.DETECTORS
(NETWORK,), (SMALL_COLLECTIVES,) = network.DETECTORS, small_collectives.DETECTORS
STEPS = 100.0
Stages = Sequence[Sequence[float]]
"""The work of each rank of each stage, in seconds per micro-batch."""


def pipelined(
    stages: Stages, micro_batches: int = 4, transfer: float = 0.0, phase: str = "backward", counted_before: float = 0.0
) -> Window:
    """Return the window of a 1F1B pipeline, whose pace the slowest rank sets.

    `counted_before` is the ratio of the micro-batches that was counted before the window.
    """
    slowest = max(max(ranks) for ranks in stages)
    usual = min(min(ranks) for ranks in stages)
    length = (micro_batches - 1) * slowest + sum(max(min(ranks), usual) for ranks in stages) + transfer
    length = max(length, micro_batches * slowest + (len(stages) - 1) * usual + transfer)
    numbers = [(stage, work) for stage, ranks in enumerate(stages) for work in ranks]
    readings = {
        rank: reading(rank, stage, work * micro_batches, usual * micro_batches, length, micro_batches, phase)
        for rank, (stage, work) in enumerate(numbers)
    }
    began = {
        rank: RankReading(
            rank, 0.0, 0.0, "0-7", stage=one.stage,
            counters=Counters(micro_steps=counted_before * one.counters.micro_steps),
        )
        for rank, one in readings.items()
    }  # fmt: skip
    facts, thresholds = compare(RUN, began, readings), Thresholds()
    return Window(facts, lost(facts, thresholds), thresholds)


def reading(
    rank: int, stage: int, work: float, usual: float, length: float, micro_batches: int, phase: str
) -> RankReading:
    seconds = {"forward": usual / 2, "backward": usual / 2, "collective_wait": length - work}
    seconds[phase] = seconds.get(phase, 0.0) + work - usual
    counters = Counters(
        steps=STEPS,
        phases={name: STEPS * spent for name, spent in seconds.items()},
        micro_steps=STEPS * micro_batches,
        collectives=CollectiveCounters({"send": STEPS * micro_batches}, {"send": 1.0}, {"send": 30.0}),
    )
    return RankReading(rank, STEPS * length, 0.0, "0-7", stage=stage, counters=counters)


def ratio(detector, window: Window) -> float:
    return detector.measure(window) or 0.0


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_a_healthy_pipeline_loses_only_its_bubble(stages, replicas, micro_batches) -> None:
    window = pipelined([[0.02] * replicas] * stages, micro_batches)
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert window.lost["bubble"] == pytest.approx(expected, abs=0.01)
    assert sum(window.lost.values()) == pytest.approx(1.0)
    for detector in (IMBALANCE, NETWORK, SMALL_COLLECTIVES):
        assert ratio(detector, window) < 0.02
    assert ratio(BUBBLE, window) - pipeline.allowance(window) < window.thresholds.loss


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("phase", ["backward", "data_wait", "other"])
def test_a_stage_with_more_work_is_named_with_its_phase_but_no_rank(slow, replicas, phase) -> None:
    works = [[0.03 if stage == slow else 0.02] * replicas for stage in range(4)]
    window = pipelined(works, 8, phase=phase)
    found = pipeline.explain_imbalance(window, ())
    assert (found.cause, found.evidence["stage"], found.evidence["ranks_in_stage"]) == (phase, slow, replicas)
    assert found.ratio > 0.2
    assert all(one.lag is None or one.lag == pytest.approx(0.0) for one in window.run.ranks)
    assert window.lost["stage_imbalance"] > 0.15
    assert sum(window.lost.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("replica", [0, 1, 3])
def test_a_rank_that_is_slow_within_its_stage_is_a_straggler_without_imbalance(stage, replica) -> None:
    works = [[0.03 if (s, r) == (stage, replica) else 0.02 for r in range(4)] for s in range(2)]
    window = pipelined(works, 8)
    slow = 4 * stage + replica
    assert max(window.run.ranks, key=lambda one: one.lag or 0.0).rank == slow
    assert late.explain(window, (slow,))
    assert ratio(IMBALANCE, window) < 0.02
    assert ratio(NETWORK, window) < 0.02
    # The slow rank computes for 0.24 s of 0.26 s; 0.02 s is the bubble of all ranks, as before.
    assert ratio(BUBBLE, window) == pytest.approx(0.02 / 0.26)
    assert window.lost["straggler"] == pytest.approx(0.08 / 0.26 * 7 / 8)


def test_too_few_micro_batches_make_an_unusually_large_bubble() -> None:
    window = pipelined([[0.02]] * 4, 2)
    assert ratio(BUBBLE, window) == pytest.approx(0.6)
    found = pipeline.explain_bubble(window, ())
    assert found
    assert found.evidence == {"stages": 4.0, "micro_batches": 2.0}


@pytest.mark.parametrize("counted_before", [0.0, 0.9, 1.0])
def test_the_bubble_does_not_depend_on_the_passes_that_happen_to_be_in_the_window(counted_before: float) -> None:
    window = pipelined([[0.02] * 4, [0.02, 0.08, 0.02, 0.02]], 4, counted_before=counted_before)
    assert ratio(BUBBLE, window) == pytest.approx(0.02 / 0.34)


def test_the_bubble_is_unknown_without_a_number_of_micro_batches() -> None:
    assert BUBBLE.measure(pipelined([[0.02]] * 4, 0, transfer=1.0)) is None


def test_waits_beyond_the_bubble_are_transfer() -> None:
    window = pipelined([[0.02, 0.02]] * 2, 8, transfer=0.1)
    assert window.lost["bubble"] == pytest.approx(1 / 9, abs=0.01)
    assert window.lost["transfer"] > 0.25


def test_without_a_pipeline_there_are_no_stages() -> None:
    window = pipelined([[0.02, 0.02]], 4)
    assert IMBALANCE.measure(window) is None
    assert BUBBLE.measure(window) is None
    assert "bubble" not in window.lost
