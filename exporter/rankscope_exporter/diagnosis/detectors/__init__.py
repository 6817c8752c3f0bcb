"""The detectors, one module each. LOSSES are measured in every part of a window; STATES are present or absent.

Each module of this package that has DETECTORS is one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from rankscope_exporter.diagnosis.detectors.loss import LossDetector
from rankscope_exporter.diagnosis.detectors.state import StateDetector
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.parts import Key

_ALL = (import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__))
MODULES: tuple[ModuleType, ...] = tuple(one for one in _ALL if hasattr(one, "DETECTORS"))
_FOUND = [detector for module in MODULES for detector in module.DETECTORS]
LOSSES = tuple(one for one in _FOUND if isinstance(one, LossDetector))
STATES = tuple(one for one in _FOUND if isinstance(one, StateDetector))
DETECTORS = (*LOSSES, *STATES)
KINDS = tuple(one.kind for one in DETECTORS)
"""All kinds of findings."""
ONE_PER_RUN = {one.kind for one in DETECTORS if one.is_one_per_run}
"""Kinds of which a run has at most one finding, although it may name ranks."""


def key_of(candidate: Candidate) -> Key:
    """Return the key that stays the same while the candidate lasts."""
    place = candidate.place
    ranks = place.ranks or (() if place.rank is None else (place.rank,))
    return candidate.kind, () if candidate.kind in ONE_PER_RUN else ranks
