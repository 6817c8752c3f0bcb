"""The phases of a rank's time: one table, which the record, the exporter, the rules and the dashboards read.

To add a phase, add it here and a probe that enters it. The record (whose layout digest changes), the exporter, the
rules and `rankscope explain` read this table. tests/trainer_hooks/record/test_phases.py fails for what else has to name
it: layout.py's constant, causes.yml, the runbook of a lagging rank, and docs/lost-time.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """One that every record has. The script's own follow these there, and are neither planned nor computing."""

    name: str
    meaning: str
    planned: bool = False
    """It may take long without being a fault, and absorbs what it contains: a data wait in it is part of it."""
    computing: bool = False
    """It is the model's own work."""
    waiting: bool = False
    """The host waits in it for what it is named after."""
    issues_nothing: bool = False
    """The host gives the device nothing to do in it."""


PHASES = (
    Phase("other", "outside the model: what no probe has a name for"),
    Phase("startup", "until the end of the first step", planned=True),
    Phase("data_wait", "the next batch is waited for", waiting=True, issues_nothing=True),
    Phase("h2d_copy", "a copy from the host to the device is waited for", waiting=True),
    Phase("forward", "the model's forward pass", computing=True),
    Phase("backward", "the backward pass", computing=True),
    Phase("collective_wait", "other ranks or the network are waited for", waiting=True),
    Phase(
        "device_wait",
        "the host waits for the device: a synchronization, a value that is read",
        waiting=True,
        issues_nothing=True,
    ),
    Phase("optimizer", "the optimizer's step", computing=True),
    Phase("checkpoint", "a checkpoint is written", planned=True),
    Phase("evaluation", "the model is evaluated", planned=True),
)
NAMES = tuple(phase.name for phase in PHASES)
PLANNED = tuple(phase.name for phase in PHASES if phase.planned)
COMPUTING = tuple(phase.name for phase in PHASES if phase.computing)
# In which a device that has nothing to do waits for the host to issue work; the script's own may be such, too.
ISSUING = tuple(phase.name for phase in PHASES if not phase.planned and not phase.waiting)
