"""A simulated run whose ranks are divided among nodes: the facts of each exporter, and an analyzer that judges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rankscope.record.layout import PHASES
from rankscope.record.sampling import is_sampled
from rankscope.record.snapshot import DeviceStep, Step
from rankscope_exporter.analyzer.request import unpack
from rankscope_exporter.analyzer.service import SECOND, Analyzer
from rankscope_exporter.diagnosis.facts import DEVICE
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import Readings, Verdict
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.node_facts.recorder import (
    LEAST_STEPS,
    MOST_STEPS,
    STEPS_OF_ALL,
    Part,
    begin,
    checksum_of,
    packed,
    part,
    separated,
)
from rankscope_exporter.node_facts.wire import Answer, Moment, SentRank, row_of
from rankscope_exporter.ranks.chosen_steps import AnyStep
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from testing.readings import EARLY, RUN, SLOW, STEP, Change, Training, Trial, drift, hang, spend

PULL_EVERY = 3
HEALTHY = 90.0
"""Seconds of healthy training before each scene."""


class Scene(NamedTuple):
    """A fault of a run of eight ranks."""

    seconds: float
    changes: tuple[Change, ...] = ()
    transfer: float | None = None
    """The seconds of each collective, if they change."""
    healthy: tuple[Change, ...] = ()
    """Changes from the start."""


SCENES = {
    "nothing": Scene(30),
    "a slow rank": Scene(30, (SLOW,)),
    "a rank that waits for data": Scene(30, (spend("data_wait", 0.1, 5),)),
    "a slow node of two": Scene(30, (spend("forward", 0.1, 4, 5, 6, 7),)),
    "two ranks on two nodes": Scene(60, (spend("forward", 0.1, 1, 6),)),
    "all ranks but one": Scene(60, (spend("backward", 0.1, *range(7)),)),
    "slow data of all ranks": Scene(30, (spend("data_wait", 0.15),)),
    "a slow network": Scene(60, (), 0.15),
    "a rank that is late in each tenth step": Scene(120, (spend("other", 1.0, 2, every=10),)),
    "a hang in the backward pass": Scene(120, (hang("backward", 3),)),
    "a hang in the data": Scene(120, (hang("data_wait", 6),)),
    "a checkpoint in each tenth step": Scene(60, (spend("checkpoint", 1.0, every=10),)),
}
QUIET = ("nothing", "a checkpoint in each tenth step")
"""The scenes without a finding."""
Key = tuple[str, str, tuple[int, ...]]


class SteppingTraining(Training):
    """A simulated run that keeps the new steps that its exporters would send."""

    def __init__(self, ranks: int = 4, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.steps: dict[int, list[AnyStep]] = defaultdict(list)
        self._sent_level = sent_level(ranks, sum(STEP.values()))

    def _finish_step(self) -> None:
        super()._finish_step()
        if not (self._is_measured() and is_sampled(self._steps, self._sent_level)):
            return
        end = self._step_began + self._length
        for rank in self._ranks:
            phases = tuple(rank.work.get(phase, 0.0) for phase in PHASES)
            is_device = self._clock == DEVICE
            step = (
                DeviceStep(self._measured_steps, self._steps, end, self._steps, phases)
                if is_device
                else Step(self._steps, end, self._length, phases)
            )
            self.steps[rank.number].append(step)

    def encoded(self, at: float, ranks: Sequence[RankReading]) -> Part:
        """Return a node's moment with these ranks as its exporter encodes it."""
        return encoded(at, RUN, ranks, self._clock, self.steps)


def encoded(
    at: float, run: Run, ranks: Sequence[RankReading], clock: str, steps: MutableMapping[int, list[AnyStep]]
) -> Part:
    """Return a node's moment with these ranks, whose new steps are taken, as its exporter encodes it."""
    sent = [
        SentRank.model_construct(
            run=[*run],
            reading=one,
            clock=DEVICE if clock == DEVICE else "host",
            steps=[row_of(step) for step in steps.pop(one.rank, ())],
        )
        for one in ranks
    ]
    return part(Moment.model_construct(at=at, ranks=sent, gpus={}).model_dump_json(exclude_defaults=True).encode())


def sent_level(ranks: int, step: float) -> int:
    """Return the level of sampling at which exporters send steps of so many seconds."""
    per_second = min(MOST_STEPS, max(LEAST_STEPS, STEPS_OF_ALL / ranks))
    return (max(1, round(1 / (step * per_second))) - 1).bit_length()


class SplitJudge:
    """The exporters of several nodes, whose answers go to an analyzer as they do in production."""

    def __init__(self, nodes: int, thresholds: Thresholds, run: Run) -> None:
        self._nodes, self._run = nodes, run
        self._now = 0.0
        self._analyzer = Analyzer(FindingFlags(thresholds=thresholds), clock=lambda: self._now)
        self._moments: dict[int, list[Part]] = defaultdict(list)

    def add(self, at: float, readings: Readings, clock: str, steps: MutableMapping[int, list[AnyStep]]) -> None:
        """Add a moment of each node, and take the new steps."""
        for node, ranks in enumerate(self._divided([*readings.values()])):
            self._moments[node].append(encoded(at, self._run, ranks, clock, steps))

    def pull(self, at: float, *, is_next: bool = False) -> Sequence[Verdict]:
        """Take all moments, and return the verdicts on these seconds; if `is_next`, only on the last one."""
        self._now = at
        for node, moments in self._moments.items():
            answer = Answer.model_validate_json(unpack(answer_of(node, at, moments)))
            self._analyzer.take(f"node-{node}", answer, at, at)
        self._moments.clear()
        if is_next:
            self._analyzer._judged_until = at - SECOND
        diagnosis = self._analyzer.update(at)
        return diagnosis.look.judged.verdicts if diagnosis else ()

    def _divided(self, readings: Sequence[RankReading]) -> Iterator[Sequence[RankReading]]:
        each = -(-len(readings) // self._nodes)
        for node, first in enumerate(range(0, len(readings), each)):
            yield [replace(one, node=f"node-{node}") for one in readings[first : first + each]]


def answer_of(node: int, at: float, moments: Sequence[Part]) -> bytes:
    """Return a node's compressed answer with these moments."""
    parts = [begin(f"node-{node}", f"boot-{node}"), *separated(moments)]
    return b"".join(packed(parts, checksum_of(parts), at))


class SplitTrial(Trial):
    """A run that is judged twice: on one node by its own judge, and divided among nodes by an analyzer."""

    def __init__(self, training: Training | None = None, thresholds: Thresholds = EARLY, *, nodes: int = 2) -> None:
        """`training` is a SteppingTraining."""
        super().__init__(training or SteppingTraining(), thresholds)
        self._nodes = SplitJudge(nodes, thresholds, RUN)
        self.alone: list[Verdict] = []
        self.split: list[Verdict] = []

    def train(self, seconds: float, *changes: Change) -> Verdict:
        """Train, and pull every third second. Return the last verdict on one node."""
        assert isinstance(self.training, SteppingTraining)
        for at, readings in self.training.train(seconds, *changes):
            self.alone.append(self.judge.update(at, readings))
            self._nodes.add(at, readings, self.training._clock, self.training.steps)
            if len(self.alone) % PULL_EVERY == 0:
                self.split += self._nodes.pull(at)
            self.verdicts.append(self.alone[-1])
        return self.verdicts[-1]

    def play(self, scene: Scene) -> float:
        """Train healthily, and then with the fault. Return its onset."""
        self.train(HEALTHY, drift, *scene.healthy)
        onset = self.training.now
        if scene.transfer is not None:
            self.training._transfer = scene.transfer
        self.train(scene.seconds + PULL_EVERY, drift, *scene.changes)
        return onset


def opened(verdicts: Sequence[Verdict]) -> dict[Key, Finding]:
    """Return each finding in its last state, by its kind, cause and ranks."""
    found: dict[Key, Finding] = {}
    for finding in (finding for verdict in verdicts for finding in verdict.findings):
        place = finding.candidate.place
        ranks = place.ranks or (() if place.rank is None else (place.rank,))
        found[finding.kind, finding.candidate.cause, ranks] = finding
    return found
