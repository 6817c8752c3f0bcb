"""The phases of a rank's time: the table for the record, the exporter, the rules, `rankscope explain` and dashboards.

To add a phase, add it here, and a probe that enters it. The record's layout digest changes. The test
tests/trainer_hooks/record/test_phases.py fails until all other places name it: layout.py's constant, causes.yml, the
runbook of a lagging rank, and docs/lost-time.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """A phase of every record. A script's own phases follow them and are neither planned nor computing."""

    name: str
    meaning: str
    planned: bool = False
    """It may take long without being a fault, and absorbs what it contains, such as a data wait."""
    computing: bool = False
    """It is the model's own work."""
    waiting: bool = False
    """The host waits for what the phase is named after."""
    issues_nothing: bool = False
    """The host issues no work to the device in it."""


PHASES = (
    Phase("other", "outside the model: not seen by any probe"),
    Phase("startup", "up to the end of the first step", planned=True),
    Phase("data_wait", "waiting for the next batch", waiting=True, issues_nothing=True),
    Phase("h2d_copy", "waiting for a copy from the host to the device", waiting=True),
    Phase("forward", "the model's forward pass", computing=True),
    Phase("backward", "the backward pass", computing=True),
    Phase("collective_wait", "waiting for other ranks or the network", waiting=True),
    Phase(
        "device_wait",
        "the host waits for the device: a synchronization, or a value that it reads",
        waiting=True,
        issues_nothing=True,
    ),
    Phase("optimizer", "the optimizer's step", computing=True),
    Phase("checkpoint", "writing a checkpoint", planned=True),
    Phase("evaluation", "evaluating the model", planned=True),
)
NAMES = tuple(phase.name for phase in PHASES)
PLANNED = tuple(phase.name for phase in PHASES if phase.planned)
COMPUTING = tuple(phase.name for phase in PHASES if phase.computing)
# Phases in which an idle device waits for the host to issue work; a script's own phases may do so too.
ISSUING = tuple(phase.name for phase in PHASES if not phase.planned and not phase.waiting)
