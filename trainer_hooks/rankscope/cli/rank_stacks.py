"""The stacks of a machine's ranks and what their records say: `rankscope stacks` shows them, an exporter sends them."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rankscope.cli.living_ranks import RecordedRank
from rankscope.cli.stacks import NoStacksError, describe_state, stacks
from rankscope.record.text import NUMBER

LEAST_SECONDS = 0.5  # for a rank, which answers within 0.1 s
OWNER_WITHIN = 120.0  # seconds for all ranks of one user, so that no user delays the others' stacks


@dataclass(frozen=True)
class RankStacks:
    """A rank with its stacks, or the reason why there are none. All texts are the job's, and may be anything."""

    run: str
    owner: int
    rank: int
    node: str
    world_size: int
    """0 if it is unknown."""
    pid: int
    """0 if it is unknown."""
    phase: str
    seconds: float
    """Time in the phase."""
    step: int
    idle: float
    """Time without progress; infinite for a rank that has ended."""
    operation: str = ""
    """The collective that it is in, by its record; else empty."""
    group: str = ""
    number: int = 0
    """The number of the collective in the group."""
    began: float = 0.0
    """When the rank began, in unix time."""
    state: str = ""
    """Why its process cannot run, such as `stopped by a signal (state T)`; else empty."""
    text: str = ""
    reason: str = ""
    """Why there is no text; else empty."""

    @property
    def has_ended(self) -> bool:
        """Return whether the rank has ended: only its last phase is known."""
        return math.isinf(self.idle)


@dataclass(frozen=True)
class StacksReport:
    """The living ranks of a run on a node, as an exporter sends them."""

    at: float
    """Unix time."""
    ranks: Sequence[RankStacks]


def may_ask(one: RecordedRank) -> bool:
    """Return whether this process may ask a rank for its stacks."""
    return os.geteuid() in (0, one.owner)


def ask_all(
    ranks: Iterable[RecordedRank], owner_within: float = OWNER_WITHIN, *, with_py_spy: bool = True
) -> Iterator[RankStacks]:
    """Yield each rank with its stacks. Once a user's ranks have taken `owner_within` seconds, others are skipped."""
    spent: Counter[int] = Counter()  # milliseconds by owner
    for one in ranks:
        began = time.monotonic()
        left = owner_within - spent[one.owner] / 1000
        try:
            if left < LEAST_SECONDS:
                raise NoStacksError(f"skipped: other ranks of the same user took {owner_within:.0f} s")
            text, reason = stacks(one, within=left, with_py_spy=with_py_spy), ""
        except NoStacksError as error:
            text, reason = "", str(error)
        spent[one.owner] += round(1000 * (time.monotonic() - began))
        yield read_rank_stacks(one, text, reason)


def read_rank_stacks(one: RecordedRank, text: str, reason: str) -> RankStacks:
    """Return what a rank's record says, with its stacks."""
    snapshot, info = one.snapshot, one.snapshot.info
    pid, size = (str(info.get(name)) for name in ("pid", "world_size"))
    return RankStacks(
        run=one.run,
        owner=one.owner,
        rank=int(one.rank),
        node=str(info.get("node") or ""),
        world_size=int(size) if NUMBER.fullmatch(size) else 0,
        pid=snapshot.lock_pid or (int(pid) if NUMBER.fullmatch(pid) else 0),
        phase=snapshot.phase,
        seconds=snapshot.read_monotonic - snapshot.phase_since,
        step=int(snapshot["steps"]),
        idle=snapshot.read_monotonic - snapshot.last_progress if snapshot.alive else math.inf,
        operation=snapshot.open_operation,
        group=snapshot.open_group,
        number=int(snapshot.issued.get(snapshot.open_group, 0.0)),
        began=snapshot.unix(snapshot["started_monotonic"]),
        state=describe_state(snapshot.lock_pid) if snapshot.lock_pid and text else "",
        text=text,
        reason=reason,
    )
