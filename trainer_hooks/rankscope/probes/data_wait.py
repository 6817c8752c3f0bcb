"""Data wait: the time in which the training thread asks a DataLoader for its next batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import dataloader

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the one method that every DataLoader iterator, single- or multi-process, goes through."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the only place that sees every loader
    return [replace(iterator, "__next__", in_phase(timeline, guard, record.DATA_WAIT))]
