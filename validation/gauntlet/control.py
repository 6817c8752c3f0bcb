"""How the ranks of the training job behave: one JSON file that the runner writes and every rank reads while it runs.

It holds from a given step on, because what changes the collectives of a step has to change on all ranks at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_MS = 112.0  # of a healthy step as measured: the sleep in forward and backward, and CPU time; doses refer to it


@dataclass(frozen=True)
class Behaviour:
    """What one rank does in a step. Times are milliseconds of sleep unless the name says otherwise."""

    fetch: float = 0  # in a loader worker, for each batch
    fetch_cpu: float = 0  # the same, computing
    copy: float = 0
    forward: float = 30
    forward_cpu: float = 0
    backward: float = 60
    aggregate: float = 0  # rank 0, between getting from all and sending to all
    post: float = 0  # after the optimizer, outside the model's phases
    rotating: float = 0  # in the forward of whichever rank's turn it is
    transfer: float = 0  # in the collective, after the data has come
    small_collectives: int = 0  # all-reduces of one number, each read at once
    read_every: int = 1  # steps between two reads of the loss, for which the host waits for the asynchronous device
    issue: float = 0  # of the host's time, for each millisecond that is launched on the asynchronous device
    collect_every: int = 10  # steps
    collect: float = 0  # in a garbage collection of a random rank
    checkpoint_every: int = 100  # steps; 0 is never
    checkpoint: float = 30
    evaluation: float = 0  # once, at the first step
    warm_up: float = 0  # in forward, more than usual, for the first 20 steps
    micro_steps: int = 1
    overflows: bool = False  # every gradient is infinite
    hangs: bool = False  # outside a collective
    hangs_in_collective: bool = False
    stays_in_startup: bool = False  # before the first step's end
    stops: bool = False  # in order, before this step


@dataclass
class Behaviours:
    """The writer's side: in what everybody and single ranks differ from a healthy rank."""

    path: Path
    everybody: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def write(self, from_step: int) -> None:
        """Let it hold from a step on; the file is never seen half-written."""
        text = json.dumps({"from_step": from_step, "everybody": self.everybody, "ranks": self.ranks})
        draft = self.path.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(self.path)


class Control:
    """A rank's side."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._written = 0
        self._from_step = 0
        self.now = self._next = Behaviour()
        """What holds in the step that the rank is in."""

    def at(self, step: int) -> Behaviour:
        """What holds in this step."""
        self.latest()
        if step >= self._from_step:
            self.now = self._next
        return self.now

    def latest(self) -> Behaviour:
        """What was written last, for those who know no step: loader workers, and whoever hangs."""
        written = self._path.stat().st_mtime_ns
        if written != self._written:
            self._written = written
            behaviours = json.loads(self._path.read_text())
            self._from_step, self._next = behaviours["from_step"], behaviour(behaviours, self._rank)
        return self._next


def behaviour(behaviours: Mapping[str, Any], rank: int) -> Behaviour:
    """One rank's part of what is in the file."""
    return Behaviour(**{**behaviours["everybody"], **behaviours["ranks"].get(str(rank), {})})


class Progress:
    """The step that rank 0 is in, in a file of fixed width: written in place, hence without a torn read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int) -> None:
        """By rank 0, at each step's begin."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(descriptor, f"{step:12d}".encode(), 0)
        os.close(descriptor)

    def read(self) -> int:
        """0 before the first step, also between the file's being made and written."""
        return int(self._path.read_text() or 0) if self._path.exists() else 0
