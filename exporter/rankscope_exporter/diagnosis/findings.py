"""Candidates, which detectors return, and findings, which are candidates that have lasted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rankscope_exporter.diagnosis.saved import Time

EVIDENCE_LIMIT = 4
LAYOUT = {"cp": "context", "tp": "tensor", "ep": "expert"}
"""The kinds of parallelism that may divide the work unevenly, and how their places are named."""
LISTED = 8
"""The most ranks that a label lists. Of more it has the number."""


class Place(NamedTuple):
    """The place of a finding. Fields are empty (None) if it concerns the whole run."""

    rank: int | None = None
    group: str = ""
    node: str = ""
    gpu: str = ""
    uuid: str = ""
    port: str = ""
    """The node's network port."""
    ranks: tuple[int, ...] = ()
    """The ranks that are late together, in order. `rank` is empty if they are several."""
    place: str = ""
    """The place that has these ranks and no other, such as `node node-a`, `GPU 3` or `context 3`."""
    also: str = ""
    """Another place with the same ranks: the layout may put them on a piece of hardware."""

    @property
    def rank_label(self) -> str:
        """Return the ranks as a label: `3`, `4-7`, `0,2,5` or `512 ranks`; empty for the whole run."""
        if self.rank is not None:
            return str(self.rank)
        if len(self.ranks) > LISTED:
            return f"{len(self.ranks)} ranks"
        is_range = len(self.ranks) > 1 and self.ranks[-1] - self.ranks[0] == len(self.ranks) - 1
        return f"{self.ranks[0]}-{self.ranks[-1]}" if is_range else ",".join(map(str, self.ranks))


@dataclass(frozen=True)
class Candidate:
    """The result of a detector in one window."""

    kind: str
    ratio: float
    """The GPU time or step time that is lost; 1 if the run makes no progress."""
    cause: str = ""
    place: Place = field(default_factory=Place)
    evidence: Mapping[str, float] = field(default_factory=dict)
    """At most EVIDENCE_LIMIT numbers by name, in base units."""
    lasted: float | None = None
    """The seconds that it has lasted, if the facts show them. Then it needs no further persistence."""
    needed: float = 0.0
    """The seconds that it has to last before it is a finding."""
    lacks: str = "time"
    """The reason why it is not a finding yet, as in `Pending.lacks`."""
    phase: str = ""
    """The phase in which it happened, if that is known and not the cause."""


@dataclass(frozen=True)
class Finding:
    """A candidate that has lasted. Cause and place are fixed when it opens: another cause is another finding."""

    candidate: Candidate
    since: Time
    """The time when it began."""
    opened: Time
    """The time when it had lasted long enough."""
    is_critical: bool = False
    baseline: str = "known"
    """`unknown` while the run is too young to have a baseline."""

    @property
    def kind(self) -> str:
        """Return the kind, which is a label of the metrics."""
        return self.candidate.kind

    @property
    def severity(self) -> str:
        """Return `critical` or `warning`."""
        return "critical" if self.is_critical else "warning"


@dataclass(frozen=True)
class Pending:
    """A candidate that is not a finding yet, and the reason."""

    candidate: Candidate
    lacks: str
    """`time`, `startup`, `steps`, `baseline`, `paused`, `interactive`, `explained` or `usual`."""
    remaining: float | None = None
    """Seconds until it is a finding if it lasts; None if unknown."""
