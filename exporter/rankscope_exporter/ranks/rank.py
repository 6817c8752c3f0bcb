"""A rank in the exporter: its record, its owner, and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.diagnosis.readings import Run

Key = tuple[str, str, str]


def is_alone(info: Mapping[str, Any]) -> bool:
    """Return whether a rank trains without others."""
    return bool(info["world_size"] == "1" and info["group"] == info["rank"])


@dataclass(frozen=True)
class Rank:
    """One rank, from its record. `exit_unix` is set after it has ended."""

    snapshot: RankSnapshot
    exit_unix: float | None
    owner: int
    """The uid of the file's owner."""
    user: str = ""
    """The owner's name, if this machine has one."""
    has_owner: bool = True
    """True if its owner is part of its identity."""
    weight: int = 1
    """The number of ordinary ranks that it counts as on a page."""
    process_start: int = 0
    """Start of its process in clock ticks since boot; 0 if unknown."""
    training: int = 1
    """Its number among the trainings that share the run's name."""
    is_elsewhere: bool = False
    """True if the node does not have the GPU that it names, or only other users' processes use the GPU."""

    @property
    def key(self) -> Key:
        """The labels of all its series: run, rank and owner."""
        info = self.snapshot.info
        name = info["run"] if self.training == 1 else f"{info['run']} ({self.training})"
        return name, info["rank"], str(self.owner) if self.has_owner else ""

    @property
    def run(self) -> Run:
        """Return the run that it is diagnosed with. A rank that trains alone is a run of its own, of any name.

        Rank 0 keeps the plain name, with which the run may start again with more ranks.
        """
        info, (name, number, owner) = self.snapshot.info, self.key
        return (name, owner, number) if is_alone(info) and number != "0" else (name, owner)

    @property
    def uuid(self) -> str:
        """Return its GPU's UUID; empty if it names none, or one that it cannot use."""
        return "" if self.is_elsewhere else str(self.snapshot.info["uuid"])


@dataclass(frozen=True)
class Scan:
    """The current content of the run directories: the ranks, and the number of skipped files by reason."""

    ranks: Sequence[Rank]
    skipped: Counter[str]
