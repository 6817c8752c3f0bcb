"""Frameworks: the functions in which their own loops evaluate, save, and process a fetched batch.

The probes of torch see everything else that frameworks do. Nothing is imported: a framework that is not in
`sys.modules` when the training begins is not in use.
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

Method = tuple[str, str, str, int]  # module within the package, class (empty: a function), name, phase


class Framework(NamedTuple):
    """The methods of a framework that are a phase, and its alternative package names."""

    packages: tuple[str, ...]
    methods: tuple[Method, ...]


# A new framework needs an entry here and a script in testing/ways; the tests name what is missing.
FRAMEWORKS = (
    Framework(
        ("lightning.pytorch", "pytorch_lightning"),
        (
            # The validation loop has no public name; `fit` does not call `Trainer.validate`.
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
            # Its loader is a generator, which may be running already; this is most of its work after a fetch.
            ("data_loader", "", "send_to_device", layout.DATA_WAIT),
        ),
    ),
)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the methods of all imported frameworks, as far as their versions have them."""
    undo = []
    for framework in FRAMEWORKS:
        for package, (module, name, method, phase) in product(framework.packages, framework.methods):
            imported = sys.modules.get(f"{package}.{module}")
            owner: Any = getattr(imported, name, None) if name else imported
            if hasattr(owner, method):
                undo.append(replace(owner, method, in_phase(timeline, guard, phase)))
    return undo
