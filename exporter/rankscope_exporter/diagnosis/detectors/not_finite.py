"""The loss or the gradient norm is NaN or infinite: the run computes, but learns nothing.

That is so if at least the last three values that a rank has logged are NaN or infinite, for `release_seconds`. A
gradient norm that was never finite needs 32 values: at the start, a gradient scaler skips steps and halves its scale
until the gradients are finite. Later it skips single steps. A script that leaves out bad batches has finite values
again.

Causes are `loss` and `gradient_norm`; the loss comes first. Only numbers count that the script gives to a logger
(`trainer_hooks/rankscope/logged_values.py`), and only the loss and the gradient norm of the whole model. Most scripts
log on rank 0 alone. Of several ranks, the finding names the one whose values were the first, by its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import LoggedValues

KIND = "not_finite"
LOSS, GRADIENT_NORM = "loss", "gradient_norm"
IN_A_ROW, AT_THE_START = 3.0, 32.0
"""The fewest values in a row; AT_THE_START for a gradient norm without a finite one: a scale of 2**32 takes 32 to reach
1, and torch's begins at 2**16."""


def detect(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield the quantity that is not finite, with the rank on which it was the first."""
    for cause in (LOSS, GRADIENT_NORM):
        logged = [(one.now, values) for one in window.run.ranks if (values := attrgetter(cause)(one.now))]
        found = [(rank, values) for rank, values in logged if values.not_finite >= _needed(cause, values)]
        if found:
            rank, values = min(found, key=lambda one: (one[1].since_step, one[0].rank))
            evidence = {"since_step": values.since_step, "values": values.not_finite}
            if len(logged) > 1:
                evidence |= {"ranks_not_finite": float(len(found)), "ranks_logging": float(len(logged))}
            yield Candidate(KIND, 1.0, cause, place(rank), evidence, needed=window.thresholds.release_seconds)
            return


def _needed(cause: str, values: LoggedValues) -> float:
    was_finite = values.values > values.not_finite
    return AT_THE_START if cause == GRADIENT_NORM and not was_finite else IN_A_ROW


DETECTORS = (
    StateDetector(KIND, detect, is_critical=True, is_one_per_run=True, explained_by=("loss_scale_collapse", "crash")),
)
