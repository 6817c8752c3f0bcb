"""Pipeline stages that wait for each other, because one has more work or there are too few micro-batches.

- `stage_imbalance`: the other stages wait for one stage, whose ranks all wait less. The loss is the median wait of the
  other stages less the wait of that stage: the time they would save if it were like them. The rank that waits most
  stands for its stage, since a rank that is slow within its stage is a straggler. The cause is the phase in which the
  stage exceeds the others most.
- `bubble`: stages are idle while the pipeline fills and drains. The loss is the least wait of any stage, at most
  (p - 1) / (m + p - 1) for p stages and m micro-batches.
"""

from __future__ import annotations

from statistics import median

from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors.late import excesses
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, default_allowance
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.late_set import Ranks

IMBALANCE, BUBBLE = "stage_imbalance", "bubble"


def measure_imbalance(window: Window) -> float | None:
    """Return the time that the other stages would save; None without a pipeline."""
    waits = sorted(lost.stage_waits(window.run).values())
    return median(waits[1:]) - waits[0] if waits else None


def explain_imbalance(window: Window, _ranks: Ranks) -> Candidate:
    """Return the loss with the slow stage and its phase."""
    stages = window.run.stages
    waits = lost.stage_waits(window.run)
    number = min(stages, key=waits.__getitem__)
    others = [one for stage, members in stages.items() if stage != number for one in members]
    excess = excesses(stages[number], others)
    cause = max(excess, key=excess.__getitem__, default="unknown")
    evidence = {"stage": float(number), "stages": float(len(stages)), "excess": excess.get(cause, 0.0)}
    evidence |= {"ranks_in_stage": float(len(stages[number]))}
    return Candidate(IMBALANCE, measure_imbalance(window) or 0.0, cause, evidence=evidence)


def measure_bubble(window: Window) -> float | None:
    """Return the bubble's ratio of the time; None without a pipeline or a known number of micro-batches."""
    is_known = window.run.stages and lost.micro_batches(window.run) is not None
    return window.lost.get(BUBBLE, 0.0) if is_known else None


def explain_bubble(window: Window, _ranks: Ranks) -> Candidate:
    """Return the loss with the numbers of stages and micro-batches."""
    batches = lost.micro_batches(window.run) or 0.0
    evidence = {"stages": float(len(window.run.stages)), "micro_batches": batches}
    return Candidate(BUBBLE, window.lost.get(BUBBLE, 0.0), evidence=evidence)


def allowance(window: Window) -> float:
    """Return the bubble that is not counted as a loss."""
    return window.thresholds.bubble_allowance


DETECTORS = (
    LossDetector(IMBALANCE, measure_imbalance, explain_imbalance, default_allowance),
    LossDetector(BUBBLE, measure_bubble, explain_bubble, allowance),
)
