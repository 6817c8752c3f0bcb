"""Frameworks: where their own loops evaluate, save, and work on a batch that they have fetched.

All else they do through torch, where the other probes are. Nothing is imported: a framework that is not in
`sys.modules` by the time the training begins is not in use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline

# A validation loop has no public name in Lightning; `Trainer.validate` is not called within `fit`.
LIGHTNING: tuple[tuple[str, str, str, int], ...] = (
    ("loops.evaluation_loop", "_EvaluationLoop", "run", layout.EVALUATION),
    ("loops.prediction_loop", "_PredictionLoop", "run", layout.EVALUATION),
    ("trainer.trainer", "Trainer", "save_checkpoint", layout.CHECKPOINT),
)
# Module, class (none: a function of the module), method, phase. Lightning has two names for the same package, of which
# a job uses one.
METHODS: tuple[tuple[str, str, str, int], ...] = (
    *((f"lightning.pytorch.{module}", name, method, phase) for module, name, method, phase in LIGHTNING),
    *((f"pytorch_lightning.{module}", name, method, phase) for module, name, method, phase in LIGHTNING),
    ("transformers.trainer", "Trainer", "evaluate", layout.EVALUATION),
    ("transformers.trainer", "Trainer", "predict", layout.EVALUATION),
    ("transformers.trainer", "Trainer", "_save_checkpoint", layout.CHECKPOINT),
    ("accelerate.accelerator", "Accelerator", "save_state", layout.CHECKPOINT),
    ("accelerate.accelerator", "Accelerator", "save_model", layout.CHECKPOINT),
    # Its loader is a generator, which may run already; this is the most that it does after fetching.
    ("accelerate.data_loader", "", "send_to_device", layout.DATA_WAIT),
)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the methods of those frameworks that are imported. A version that lacks one is watched without it."""
    undo = []
    for module, name, method, phase in METHODS:
        imported = sys.modules.get(module)
        owner: Any = getattr(imported, name, None) if name else imported
        if hasattr(owner, method):
            undo.append(replace(owner, method, in_phase(timeline, guard, phase)))
    return undo
