"""A rank in the exporter: its record, its owner, and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.record.snapshot import RankSnapshot

Key = tuple[str, str, str]


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
    is_elsewhere: bool = False
    """True if the node does not have the GPU that it names, or only other users' processes use the GPU."""

    @property
    def key(self) -> Key:
        """The labels of all its series: run, rank and owner."""
        return self.snapshot.info["run"], self.snapshot.info["rank"], str(self.owner) if self.has_owner else ""

    @property
    def has_parent(self) -> bool:
        """Return whether another rank's process has started its process."""
        return bool(self.snapshot.info.get("parent"))

    def is_child_of(self, other: Rank) -> bool:
        """Return whether the other rank's process has started its process."""
        return self.has_parent and self.snapshot.info["parent"] == other.snapshot.info["pid"]

    @property
    def uuid(self) -> str:
        """Return its GPU's UUID; empty if it names none, or one that it cannot use."""
        return "" if self.is_elsewhere else str(self.snapshot.info["uuid"])


@dataclass(frozen=True)
class Scan:
    """The current content of the run directories: the ranks, and the number of skipped files by reason."""

    ranks: Sequence[Rank]
    skipped: Counter[str]
