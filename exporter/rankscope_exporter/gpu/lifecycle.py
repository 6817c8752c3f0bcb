"""Phases of the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Phase of the sampler, according to the requests it received."""

    STARTING = "some GPUs have not been read since the start"
    SAMPLING = "every GPU has been read: a scrape is complete"
    RELEASED = "the handles are released on request"
    RESUMING = "the handles are reacquired, and some GPUs have not been read since"


@dataclass
class PhaseEntry:
    """The phase that was entered last. SAMPLING is never entered: STARTING and RESUMING become it after all reads."""

    phase: Phase
    since: float
    """Monotonic seconds, like `until`."""
    until: float = math.inf
    """When RELEASED ends without a request to resume."""
    has_supervised: bool = False
    """True if the driver has been checked since."""
