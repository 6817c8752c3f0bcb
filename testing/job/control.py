"""The behavior of the training job's ranks: one JSON file that the launcher writes and every rank reads while it runs.

A behavior takes effect at a given step, because a change of a step's collectives must reach all ranks at once.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_MS = 112.0  # a measured healthy step: the sleep in forward and backward, and CPU time; doses are relative to it
PROGRESS_WIDTH = 32  # bytes a line


@dataclass(frozen=True)
class Behavior:
    """The behavior of one rank in a step. Times are milliseconds of sleep unless the name says otherwise."""

    fetch: float = 0  # in the data loader, for each batch
    fetch_cpu: float = 0  # the same, computing
    copy: float = 0
    forward: float = 30
    forward_cpu: float = 0
    backward: float = 60
    aggregate: float = 0  # rank 0, between receiving from all ranks and sending to all ranks
    optimizer: float = 0  # before the optimizer updates the parameters
    post: float = 0  # after the optimizer, outside the model's phases
    rotating: float = 0  # in forward, on another random rank in each step
    transfer: float = 0  # in the collective, after the data has arrived
    small_collectives: int = 0  # all-reduces of one number, each read at once
    read_every: int = 1  # steps between two reads of the loss; for each, the host waits for the asynchronous device
    issue: float = 0  # of host time for each millisecond of work launched on the asynchronous device
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
    stays_in_startup: bool = False  # during the first step
    stops: bool = False  # normally, before this step
    steps: int = 0  # after which the job ends; 0 is never
    # The rest applies to the whole job and takes effect when it starts.
    loader_workers: int = 1  # 0: the rank loads its batches itself
    reraises: bool = False  # an error of the hook ends the job
    measures_every_step: bool = False  # by the clock of the asynchronous device


@dataclass
class ControlWriter:
    """The launcher's side: the differences of all ranks and of single ranks from a healthy rank."""

    path: Path
    common: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def write(self, from_step: int) -> None:
        """Write the behavior from a step on, atomically."""
        text = json.dumps({"from_step": from_step, "common": self.common, "ranks": self.ranks})
        draft = self.path.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(self.path)


class ControlReader:
    """A rank's side."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._written = 0
        self._from_step = 0
        self.now = self._next = Behavior()
        """The behavior in the rank's current step."""

    def at(self, step: int) -> Behavior:
        """Return the behavior in this step."""
        self.latest()
        if step >= self._from_step:
            self.now = self._next
        return self.now

    def latest(self) -> Behavior:
        """Return the latest behavior, for callers without a step: loader workers, and a rank that hangs."""
        written = self._path.stat().st_mtime_ns
        if written != self._written:
            self._written = written
            content = json.loads(self._path.read_text())
            own = content["ranks"].get(str(self._rank), {})
            self._from_step, self._next = content["from_step"], Behavior(**{**content["common"], **own})
        return self._next


class Progress:
    """The steps that rank 0 has begun: one line each, of fixed width, so that the file's size gives their number."""

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, time.perf_counter()

    def begin_step(self) -> None:
        """Write the unix time at which the step begins, and the seconds since the last one began."""
        now = time.perf_counter()
        with self._path.open("a") as file:
            file.write(f"{time.time():17.6f} {now - self._last:13.6f}\n")
        self._last = now

    def read(self) -> int:
        """Return the step that rank 0 is in; 0 before the first."""
        return self._path.stat().st_size // PROGRESS_WIDTH if self._path.exists() else 0

    def read_steps(self) -> list[tuple[float, float]]:
        """Return when each step ended, in unix time, and its seconds."""
        lines = self._path.read_text().splitlines()
        return [(float(end), float(seconds)) for end, seconds in map(str.split, lines[1:])]
