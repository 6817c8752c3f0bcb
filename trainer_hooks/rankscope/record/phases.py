"""The phases of a rank's time: one table, which the record, the exporter, the rules and the dashboards read.

A new phase is a line here; its colour is grafana's (`rankscope_dashboards/phases.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """One that every record has. The script's own follow these there, and are neither planned nor computing."""

    name: str
    meaning: str
    planned: bool = (
        False  # may take long without being a fault; absorbs what it contains: a data wait in it is part of it
    )
    computing: bool = False  # the model's own work


PHASES = (
    Phase("other", "outside the model: what no probe has a name for"),
    Phase("startup", "until the end of the first step", planned=True),
    Phase("data_wait", "the next batch is waited for"),
    Phase("h2d_copy", "a copy from the host to the device is waited for"),
    Phase("forward", "the model's forward pass", computing=True),
    Phase("backward", "the backward pass", computing=True),
    Phase("collective_wait", "other ranks or the network are waited for"),
    Phase("device_wait", "the host waits for the device: a synchronisation, a value that is read"),
    Phase("optimizer", "the optimizer's step", computing=True),
    Phase("checkpoint", "a checkpoint is written", planned=True),
    Phase("evaluation", "the model is evaluated", planned=True),
)
NAMES = tuple(phase.name for phase in PHASES)
PLANNED = tuple(phase.name for phase in PHASES if phase.planned)
COMPUTING = tuple(phase.name for phase in PHASES if phase.computing)
