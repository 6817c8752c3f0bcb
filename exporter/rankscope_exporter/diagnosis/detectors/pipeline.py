"""A pipeline whose stages wait for each other: for a stage with more work, or because the micro-batches are too few.

- `stage_imbalance`: all ranks of one stage wait less than those of the others, which wait for it. The loss is what the
  middle of the other stages waits beyond it: so much they would save if it were like them. Of each stage the rank
  counts that waits most: one that is slow within its stage is a straggler. The cause is the phase in which that stage
  exceeds the others most.
- `bubble`: while a pipeline fills and drains, stages have nothing to do. The loss is what even the stage waits that
  waits least, up to what the schedule makes of p stages and m micro-batches, (p - 1) / (m + p - 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, usual, whole_run
from rankscope_exporter.diagnosis.facts import WAIT, RankFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.thresholds import Thresholds

IMBALANCE, BUBBLE = "stage_imbalance", "bubble"


def measure_imbalance(window: Window) -> Mapping[int | None, float]:
    """Return what the other stages would save. Nothing without a pipeline."""
    waits = sorted(lost.most_wait(members) for members in window.run.stages.values())
    return whole_run(median(waits[1:]) - waits[0]) if waits else {}


def explain_imbalance(window: Window, _rank: int | None) -> Candidate:
    """Return the loss with the stage and its phase."""
    stages = window.run.stages
    number = min(stages, key=lambda stage: lost.most_wait(stages[stage]))
    others = [one for stage, members in stages.items() if stage != number for one in members]
    excess = _excesses(stages[number], others)
    cause = max(excess, key=excess.__getitem__, default="unknown")
    evidence = {"stage": float(number), "stages": float(len(stages)), "excess": excess.get(cause, 0.0)}
    evidence |= {"ranks_in_stage": float(len(stages[number]))}
    return Candidate(IMBALANCE, measure_imbalance(window)[None], cause, evidence=evidence)


def _excesses(ranks: Sequence[RankFacts], others: Sequence[RankFacts]) -> Mapping[str, float]:
    names = {phase for one in (*ranks, *others) for phase in one.step_ratios} - {WAIT, *phases.PLANNED}
    return {
        phase: fmean(one.step_ratios.get(phase, 0.0) for one in ranks)
        - fmean(one.step_ratios.get(phase, 0.0) for one in others)
        for phase in sorted(names)
    }


def measure_bubble(window: Window) -> Mapping[int | None, float]:
    """Return the bubble. Nothing without a pipeline."""
    return whole_run(window.lost.get(BUBBLE, 0.0)) if window.run.stages else {}


def explain_bubble(window: Window, _rank: int | None) -> Candidate | None:
    """Return the loss with what the schedule depends on. None where the number of micro-batches is not known."""
    batches = lost.micro_batches(window.run)
    if batches is None:
        return None
    evidence = {"stages": float(len(window.run.stages)), "micro_batches": batches}
    return Candidate(BUBBLE, window.lost.get(BUBBLE, 0.0), evidence=evidence)


def allowance(thresholds: Thresholds, _ranks: int) -> float:
    """Return how much bubble is usual."""
    return thresholds.bubble_allowance


DETECTORS = (
    LossDetector(IMBALANCE, measure_imbalance, explain_imbalance, usual),
    LossDetector(BUBBLE, measure_bubble, explain_bubble, allowance),
)
