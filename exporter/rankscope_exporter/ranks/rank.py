"""What a rank is to the exporter: what its record says, whose it is, and whether it lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.record.snapshot import RankSnapshot

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Rank:
    """One rank as its record shows it; `exit_unix` is set once it has ended."""

    snapshot: RankSnapshot
    exit_unix: float | None
    owner: int
    """User id of the file's owner."""
    user: str = ""
    """The owner's name where this machine knows one."""
    has_owner: bool = True
    """Whether its owner is part of who it is."""
    weight: int = 1
    """As how many ordinary ranks it counts on a page."""
    is_elsewhere: bool = False
    """Whether the node lacks the GPU that it names, or the processes on it are others'."""

    @property
    def key(self) -> Key:
        """Run, rank and owner: the labels of all its series."""
        return self.snapshot.info["run"], self.snapshot.info["rank"], str(self.owner) if self.has_owner else ""

    @property
    def has_parent(self) -> bool:
        """Whether a process that was a rank has started its process."""
        return bool(self.snapshot.info.get("parent"))

    def is_child_of(self, other: Rank) -> bool:
        """Whether the other one's process has started its process."""
        return self.has_parent and self.snapshot.info["parent"] == other.snapshot.info["pid"]

    @property
    def uuid(self) -> str:
        """Of its GPU; empty if it names none, or one that it cannot be on."""
        return "" if self.is_elsewhere else str(self.snapshot.info["uuid"])


@dataclass(frozen=True)
class Scan:
    """What the run directories hold now: the record that counts of each rank, and how many files were skipped why."""

    ranks: Sequence[Rank]
    skipped: Counter[str]
