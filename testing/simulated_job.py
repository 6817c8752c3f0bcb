"""Simulated ranks whose clock a test sets: their records, and the exporter's alignment of their steps."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment
from testing.records import rank_info

COMPUTE, TRANSFER, DELAY = 0.04, 0.005, 0.03

Durations = Mapping[str, float]
Plan = Callable[[int, int], Durations]
"""The seconds by phase before the collective, for a step and a rank."""


class SimulatedRank:
    """A record of a rank whose clock the test sets."""

    def __init__(self, directory: Path, rank: int, start: float, **labels: object) -> None:
        self.now = start
        self.writer = RankWriter()
        self._timeline = Timeline(self.writer, lambda: self.now)
        info = rank_info(**{"rank": str(rank), "group": "0-3", **labels})
        self._phases = (*layout.PHASES, *info.get("phases", ()))
        self.writer.publish(directory, f"{info['run']}.{rank}.{start}", info)

    def spend(self, phase: str, seconds: float) -> None:
        depth = self._timeline.enter(self._phases.index(phase))
        self.now += seconds
        self._timeline.leave(depth)

    def enter(self, phase: str) -> None:
        self._timeline.enter(self._phases.index(phase))

    def step(self) -> None:
        self._timeline.step()

    def measure(self, seconds: Mapping[str, float], sequence: int) -> None:
        """Write the last step of the host as measured on the device."""
        slots, nth = self.writer.slots, self.writer.slots[layout.INDEX["device_steps"]] + 1
        phases = [seconds.get(phase, 0.0) for phase in layout.PHASES]
        entry = (nth, self._timeline.steps.count, self.now, sequence, *phases)
        self.writer.device_ring[int(nth) % layout.DEVICE_RING_STEPS][:] = array("d", entry)
        slots[layout.INDEX["device_steps"]] = nth


class Job:
    """Ranks in synchronous training: in each step all wait for the last rank, and then for the transfer."""

    def __init__(self, directory: Path, ranks: int = 4, start: float = 1000.0, **labels: object) -> None:
        self.ranks = [SimulatedRank(directory, rank, start, **labels) for rank in range(ranks)]

    @classmethod
    def on_nodes(cls, directories: Sequence[Path], ranks: int = 4, start: float = 1000.0, **labels: object) -> Job:
        """Return a job with equally many ranks in each of the directories, which are nodes and have their names."""
        job = cls(directories[0], 0)
        for rank in range(ranks):
            directory = directories[rank * len(directories) // ranks]
            job.ranks.append(SimulatedRank(directory, rank, start, **{"node": directory.name, **labels}))
        return job

    def run(self, steps: int, plan: Plan, transfer: float = TRANSFER, after: Plan = lambda _s, _r: {}) -> Job:
        """Make these steps. Return this job."""
        for step in range(steps):
            self._spend(step, plan)
            all_arrived = max(rank.now for rank in self.ranks)
            for rank in self.ranks:
                rank.spend("collective_wait", all_arrived - rank.now + transfer)
            self._spend(step, after)
            for rank in self.ranks:
                rank.step()
        return self

    def _spend(self, step: int, plan: Plan) -> None:
        for number, rank in enumerate(self.ranks):
            for phase, seconds in plan(step, number).items():
                rank.spend(phase, seconds)


def even(_step: int, _rank: int) -> Durations:
    return {"forward": COMPUTE / 4, "backward": COMPUTE * 3 / 4}


def rotating(step: int, rank: int) -> Durations:
    slow = random.Random(step).randrange(4)
    return {"data_wait": DELAY if rank == slow else 0.001, **even(step, rank)}


def lagging(phase: str, laggard: int = 2) -> Plan:
    return lambda step, rank: {**even(step, rank), phase: DELAY + COMPUTE if rank == laggard else COMPUTE}


def scan(directory: RunDirectory, *, alive: bool = True) -> Scan:
    """Return the scan of the run directory. The kernel hides a process's own locks, so `alive` replaces them."""
    found = directory.scan(with_steps=True)
    ranks = [replace(rank, snapshot=replace(rank.snapshot, alive=alive)) for rank in found.ranks]
    return replace(found, ranks=ranks)


class Aligning:
    """The alignment of the ranks of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_directory = RunDirectory([run_dir])
        self._alignment = StepAlignment()
        self._latest: list[Alignment] = []

    def poll(self, *, alive: bool = True) -> Aligning:
        """Read and align all ranks. Return this object."""
        self._latest = deepcopy(self._alignment.take(scan(self._run_directory, alive=alive).ranks))
        return self

    def alignments(self) -> list[Alignment]:
        """Return the alignments with any aligned step."""
        return [alignment for alignment in self._latest if alignment.steps]


class AsynchronousJob:
    """Ranks whose devices wait for each other: each host runs ahead of its device by some steps."""

    def __init__(self, directory: Path, *ahead: float, start: float = 1000.0, **labels: str) -> None:
        ranks = [SimulatedRank(directory, r, start - 10, backend="nccl", **labels) for r in range(len(ahead))]
        for rank, steps in zip(ranks, ahead, strict=True):
            rank.spend("startup", 10 - steps * COMPUTE)
        self.ranks = ranks

    def run(
        self,
        numbers: Iterable[int],
        plan: Plan,
        transfer: float = TRANSFER,
        is_measured: Callable[[int, int], bool] = lambda _step, _rank: True,
        sequence: Callable[[int, int], int] = lambda step, _rank: 7 * step,
    ) -> None:
        """Run the steps of these numbers, from 1. `is_measured` and `sequence` are functions of step and rank."""
        for number in numbers:
            plans = [plan(number, rank) for rank in range(len(self.ranks))]
            length = max(sum(durations.values()) for durations in plans) + transfer
            for rank, (simulated, durations) in enumerate(zip(self.ranks, plans, strict=True)):
                simulated.spend("other", length)
                simulated.step()
                if is_measured(number, rank):
                    wait = length - sum(durations.values())
                    simulated.measure({**durations, "collective_wait": wait}, sequence(number, rank))
