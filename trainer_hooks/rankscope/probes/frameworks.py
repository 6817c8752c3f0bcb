"""Frameworks: where their own loops evaluate, save, and work on a batch that they have fetched.

All else they do through torch, where the other probes are. Nothing is imported: a framework that is not in
`sys.modules` by the time the training begins is not in use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline

Method = tuple[str, str, str, int]  # its module within the package, its class (none: a function), its name, the phase


class Framework(NamedTuple):
    """Methods that mean a phase, and the packages that the framework is imported as, of which a job uses one."""

    packages: tuple[str, ...]
    methods: tuple[Method, ...]


# A new framework is an entry here and a way to train (testing/ways); its tests name what is missing of the two.
FRAMEWORKS = (
    Framework(
        ("lightning.pytorch", "pytorch_lightning"),
        (
            # A validation loop has no public name; `Trainer.validate` is not called within `fit`.
            ("loops.evaluation_loop", "_EvaluationLoop", "run", layout.EVALUATION),
            ("loops.prediction_loop", "_PredictionLoop", "run", layout.EVALUATION),
            ("trainer.trainer", "Trainer", "save_checkpoint", layout.CHECKPOINT),
        ),
    ),
    Framework(
        ("transformers",),
        (
            ("trainer", "Trainer", "evaluate", layout.EVALUATION),
            ("trainer", "Trainer", "predict", layout.EVALUATION),
            ("trainer", "Trainer", "_save_checkpoint", layout.CHECKPOINT),
        ),
    ),
    Framework(
        ("accelerate",),
        (
            ("accelerator", "Accelerator", "save_state", layout.CHECKPOINT),
            ("accelerator", "Accelerator", "save_model", layout.CHECKPOINT),
            # Its loader is a generator, which may run already; this is the most that it does after fetching.
            ("data_loader", "", "send_to_device", layout.DATA_WAIT),
        ),
    ),
)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the methods of those frameworks that are imported. A version that lacks one is watched without it."""
    undo = []
    for framework in FRAMEWORKS:
        for package, (module, name, method, phase) in product(framework.packages, framework.methods):
            imported = sys.modules.get(f"{package}.{module}")
            owner: Any = getattr(imported, name, None) if name else imported
            if hasattr(owner, method):
                undo.append(replace(owner, method, in_phase(timeline, guard, phase)))
    return undo
