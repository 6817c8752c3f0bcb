"""The work of a run's ranks, step by step.

Training is synchronous: a step ends for all ranks when the slowest has arrived and the transfer is done; the others
wait.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

PHASES = (
    "optimizer",
    "other",
    "checkpoint",
    "evaluation",
    "data_wait",
    "h2d_copy",
    "forward",
    "backward",
    "collective_wait",
    "startup",
)
"""Phases in the order of a step, from one collective to the next; the last one is before all steps."""
P = {name: number for number, name in enumerate(PHASES)}
WAIT = P["collective_wait"]
WORK = {P["forward"]: 0.3, P["backward"]: 0.6, P["optimizer"]: 0.07, P["other"]: 0.03}
"""Ratios of a step without transfer."""
DOWN = 10.0  # seconds between the end of a job and the start of the next

Array = npt.NDArray[Any]
