"""What detectors return, and what becomes of it: candidates and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

EVIDENCE_LIMIT = 4
OF_THE_RUN = frozenset({"hang", "crash", "network"})
"""Kinds of which a run has one at a time, though they name a rank."""


class Place(NamedTuple):
    """Where it is. Empty (None) where it is the whole run."""

    rank: int | None = None
    group: str = ""
    node: str = ""
    gpu: str = ""
    uuid: str = ""
    port: str = ""
    """The node's network port."""


@dataclass(frozen=True)
class Candidate:
    """What a detector sees in one window."""

    kind: str
    ratio: float
    """GPU time or step time that is lost; for what stands still 1."""
    cause: str = ""
    place: Place = field(default_factory=Place)
    evidence: Mapping[str, float] = field(default_factory=dict)
    """At most EVIDENCE_LIMIT numbers by name, in base units."""
    lasted: float | None = None
    """For how many seconds already, where the facts themselves say so; then no persistence is asked for."""
    needed: float = 0.0
    """How many seconds it has to last, where `lasted` is given."""

    @property
    def key(self) -> tuple[str, int | None]:
        """What stays the same while it lasts."""
        return self.kind, None if self.kind in OF_THE_RUN else self.place.rank


@dataclass(frozen=True)
class Finding:
    """A candidate that has lasted. Cause and place are fixed when it opens."""

    candidate: Candidate
    since: float
    """When it began, in seconds of the caller's clock."""
    opened: float
    """When it had lasted long enough."""
    is_critical: bool = False
    baseline: str = "known"
    """`unknown` while the run is too young to have one."""

    @property
    def kind(self) -> str:
        """As RankscopeFindings' label."""
        return self.candidate.kind

    @property
    def severity(self) -> str:
        """Return `critical` or `warning`."""
        return "critical" if self.is_critical else "warning"


@dataclass(frozen=True)
class Pending:
    """A candidate that is not a finding yet, and what it lacks."""

    candidate: Candidate
    lacks: str
    """`time`, `steps`, `baseline`, `paused`, `interactive` or `explained`."""
    remaining: float | None = None
    """Seconds until it is one, if it goes on and that is known."""
