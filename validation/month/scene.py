"""Simulated runs of the local month, drawn from their number, with the finding that is right for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from validation.month.plan import (
    DAY,
    DOSES,
    HOUR,
    MINUTE,
    MOST_COLLECTING,
    Draw,
    Plan,
    SimulatedEvent,
    between,
    draw_events,
    draw_run,
)

from rankscope_exporter.diagnosis.thresholds import Thresholds

SIZES = {2: 0.25, 3: 0.05, 4: 0.4, 8: 0.27, 16: 0.03}
LONG_STEPS, LONGEST = 0.15, 1200.0
"""Ratio of the runs with steps of 3 s to 20 min, and these in seconds; the others have steps of 20 ms to 3 s."""
COMPUTE = {"forward": 1 / 3, "backward": 2 / 3}
UNEVEN_PHASES = ("forward", "backward", "optimizer", "other", "data_wait", "h2d_copy")

Choose = Callable[[int, Draw], tuple[int, ...]]
"""Draws the late ranks of a number of ranks."""


@dataclass(frozen=True)
class Extra:
    """Time that some ranks spend in addition, in each n-th step, as a ratio of the usual step."""

    phases: Mapping[str, float]
    ratio: float
    ranks: tuple[int, ...]
    every: int = 1
    in_turn: bool = False
    """True if it is another one of the ranks in each step."""


@dataclass(frozen=True)
class Mode:
    """The steps of a run from some time on. Factors are relative to its usual steps."""

    extras: tuple[Extra, ...] = ()
    work: float = 1.0
    transfer: float = 1.0
    bytes: float = 1.0
    micro_steps: float = 1.0
    throttled: tuple[int, ...] = ()
    clock: float = 1.0
    """The clock of the throttled ranks' GPUs as a ratio of the highest."""
    compiles: float = 0.0
    """The ratio of the time in which the host compiles and the GPUs are idle."""


USUAL = Mode()


@dataclass(frozen=True)
class Truth:
    """The right finding; without kinds, none is right."""

    kinds: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """Empty if it concerns the whole run."""
    causes: tuple[str, ...] = ()
    """Empty if it has no cause."""
    begins: float = 0.0
    """The onset of a fault; of a healthy run, the time from which its pace is known."""
    ends: float = 0.0


@dataclass(frozen=True)
class Scene:
    """A simulated run."""

    plan: Plan
    truth: Truth = Truth()
    modes: tuple[tuple[float, Mode], ...] = ((0.0, USUAL),)
    """Each with the time from which it applies."""
    stages: int = 1
    """Pipeline stages of consecutive ranks."""
    nodes: int = 1
    uneven: tuple[str, float, float] = ("", 0.0, 0.0)
    """A phase, its additional ratio of a step, and the standard deviation of its logarithm by rank and step."""
    startup: float = 60.0
    measured_every: float = 1.2
    """Seconds between two steps that are measured on the device; steps with many phases have fewer."""
    has_optimizer: bool = True
    experts: tuple[int, ...] = ()
    """Ranks whose experts get more tokens while the fault lasts."""

    @property
    def peers(self) -> list[list[int]]:
        """Return the ranks that are compared with each other."""
        size = self.plan.ranks // self.stages
        return [list(range(first, first + size)) for first in range(0, self.plan.ranks, size)]

    def planned(self, **changes: Any) -> Scene:
        """Return the scene with another plan."""
        return replace(self, plan=replace(self.plan, **changes))

    def with_truth(self, **changes: Any) -> Scene:
        """Return the scene with another truth."""
        return replace(self, truth=replace(self.truth, **changes))

    def with_fault(self, mode: Mode) -> Scene:
        """Return the scene with a mode from the onset to the end of its fault."""
        return replace(self, modes=((0.0, USUAL), (self.truth.begins, mode), (self.truth.ends, USUAL)))


def healthy(number: int) -> tuple[str, Scene]:
    """Return the kind of a healthy run, and the run."""
    draw = np.random.default_rng((25, number))
    weights = [weight for weight, _ in HEALTHY.values()]
    kind = str(draw.choice(list(HEALTHY), p=weights))
    return kind, _completed(HEALTHY[kind][1](_run(f"{kind}-{number}", number, draw), draw))


def faulty(fault: str, dose: float, number: int) -> Scene:
    """Return a run that is healthy for half an hour and 60 steps at least, and then has a fault."""
    draw = np.random.default_rng((26, list(FAULTS).index(fault), round(100 * dose), number))
    scene = _run(f"{fault}-{dose:g}-{number}", number, draw, has_long_steps=fault not in SHORT_STEPS)
    step, lasts = scene.plan.step, LASTS.get(fault, 30 * MINUTE)
    begins = max(30 * MINUTE, 60 * step) + draw.uniform(0, MINUTE)
    ends = begins + max(lasts, 40 * step)
    scene = scene.planned(seconds=ends + max(10 * MINUTE, 10 * step), dose=dose, lengths=0.0)
    return _completed(FAULTS[fault](replace(scene, truth=Truth(begins=begins, ends=ends)), draw))


def faults() -> list[tuple[str, float]]:
    """Return all faults with their doses: in most of them the factor of the step time."""
    return [(fault, dose) for fault in FAULTS for dose in DOSES_OF.get(fault, DOSES)]


def _run(name: str, number: int, draw: Draw, *, has_long_steps: bool = True) -> Scene:
    ranks = int(draw.choice(list(SIZES), p=list(SIZES.values())))
    is_long = has_long_steps and draw.random() < LONG_STEPS
    step = between(draw, 3.0, LONGEST) if is_long else between(draw, 0.02, 3.0)
    plan = draw_run(name.replace(" ", "-"), number, ranks, step, draw)
    return Scene(plan, startup=between(draw, 10.0, 240.0), measured_every=float(draw.choice([1.2, 3.0])))


def _completed(scene: Scene) -> Scene:
    """Return the scene with a checkpoint each hour, if it has none, and as few garbage collections as planned."""
    plan, events = scene.plan, scene.plan.events
    rarest = plan.ranks * plan.collect / (MOST_COLLECTING * plan.step)
    scene = scene.planned(collect_every=max(plan.collect_every, rarest))
    if any(one.kind == "checkpoint" for one in events):
        return scene
    saved = [SimulatedEvent("checkpoint", at, 2.0) for at in np.arange(HOUR, scene.plan.seconds, HOUR).tolist()]
    return scene.planned(events=tuple(sorted((*events, *saved), key=lambda one: one.at)))


def _short_steps(scene: Scene, draw: Draw) -> Scene:
    return scene.planned(step=between(draw, 0.02, 3.0))


def _of_size(scene: Scene, draw: Draw, *sizes: int) -> Scene:
    ranks = int(draw.choice(sizes))
    return scene.planned(ranks=ranks, speed=np.clip(draw.normal(1.0, 0.01, ranks), 0.98, 1.02))


def _with_events(scene: Scene, draw: Draw) -> Scene:
    events = sorted(draw_events(scene.plan, draw), key=lambda one: one.at)
    return scene.planned(events=tuple(one for one in events if one.at < scene.plan.seconds))


# Healthy runs


def _day(scene: Scene, draw: Draw) -> Scene:
    """Return a day in which the batches, the speed of the network and the power limit of a rack change."""
    changes = [(0.0, 1.0), *((float(draw.uniform(0, DAY)), draw.uniform(0.5, 2.0)) for _ in range(draw.poisson(1.0)))]
    swing = [(part * DAY / 4, 1.0 + scene.plan.swing * (0, 1, 0, -1)[part]) for part in range(4)]
    starts = draw.uniform(0, DAY, draw.poisson(0.5))
    caps = [(at, at + draw.uniform(600, 10800), draw.uniform(0.02, 0.07)) for at in starts]
    modes = []
    for at in sorted({at for at, *_ in (*changes, *swing, *caps)} | {ends for _, ends, _ in caps}):
        (_, work), (_, transfer) = (max(one for one in values if one[0] <= at) for values in (changes, swing))
        capped = max((part for begins, ends, part in caps if begins <= at < ends), default=0.0)
        gpus = tuple(range(scene.plan.ranks)) if capped else ()
        modes.append((at, Mode(work=work / (1 - capped), transfer=transfer, throttled=gpus, clock=1 - capped)))
    return replace(_with_events(scene, draw), modes=tuple(modes))


def _uneven(scene: Scene, draw: Draw) -> Scene:
    phase = str(draw.choice(UNEVEN_PHASES))
    # A wait that is longer than this is a loss of every rank, even or not.
    ratio = draw.uniform(0.01, 0.05) if phase in ("data_wait", "h2d_copy") else draw.uniform(0.2, 0.9)
    uneven = phase, ratio, draw.uniform(0.05, 0.5)
    scene = scene.planned(seconds=min(max(3 * HOUR, 200 * scene.plan.step), DAY))
    return replace(_with_events(scene, draw), uneven=uneven)


def _pauses(scene: Scene, draw: Draw, every: float, seconds: float, rank: int | None = None) -> Scene:
    """Return a run with a pause again and again. The first one shows how long they are."""
    scene, events = _short_steps(scene, draw).planned(seconds=8 * HOUR), list[SimulatedEvent]()
    at = scene.startup + max(every, 10 * MINUTE)
    while at < 8 * HOUR:
        events.append(SimulatedEvent("other", at, seconds * float(draw.lognormal(0, 0.1)), rank))
        at += every + events[-1].seconds
    return scene.planned(events=tuple(events)).with_truth(begins=events[0].at + events[0].seconds + MINUTE)


def _rollouts(scene: Scene, draw: Draw) -> Scene:
    return _pauses(scene, draw, between(draw, MINUTE, 15 * MINUTE), between(draw, MINUTE, 30 * MINUTE))


def _hourly(scene: Scene, draw: Draw) -> Scene:
    rank = int(draw.integers(scene.plan.ranks)) if draw.random() < 0.5 else None
    return _pauses(scene, draw, draw.uniform(50, 75) * MINUTE, between(draw, 20.0, 100.0), rank)


def _changed(scene: Scene, draw: Draw) -> Scene:
    """Return a job that changes: ten times the gradients, longer or shorter batches, or more of them in a step."""
    factor, count = between(draw, 1.5, 4.0), int(draw.choice([2, 4, 8]))
    scene = scene.planned(step=min(scene.plan.step, LONGEST / 8))
    unfrozen = Mode(work=1.1, transfer=10.0, bytes=10.0)
    modes = unfrozen, Mode(work=factor), Mode(work=1 / factor), Mode(work=count, micro_steps=count)
    mode = modes[int(draw.integers(len(modes)))]
    scene = scene.planned(seconds=min(max(4 * HOUR, 400 * scene.plan.step), DAY))
    if mode is unfrozen:
        scene = scene.planned(transfer=draw.uniform(0.01, 0.033))
    else:
        scene = scene.planned(transfer=min(scene.plan.transfer, mode.work / 3))
    # Then the transfer is at most a quarter of the step.
    return replace(scene, modes=((0.0, USUAL), (draw.uniform(0.2, 0.5) * scene.plan.seconds, mode)))


def _evaluating(scene: Scene, _: Draw) -> Scene:
    return replace(scene.planned(seconds=3 * HOUR), has_optimizer=False)


def _restarting(scene: Scene, draw: Draw) -> Scene:
    """Return a run in which one rank's process restarts again and again, for 2% of the time."""
    if not scene.truth.ends:
        scene = _short_steps(scene, draw).planned(seconds=4 * HOUR)
    every, rank = between(draw, 30.0, 30 * MINUTE), int(draw.integers(1, scene.plan.ranks))
    times = np.arange(scene.startup + every, scene.plan.seconds, every).tolist()
    return scene.planned(
        events=tuple(SimulatedEvent("rank restart", at, min(10.0, 0.02 * every), rank) for at in times)
    )


HEALTHY: dict[str, tuple[float, Callable[[Scene, Draw], Scene]]] = {
    "day": (0.4, _day),
    "uneven work": (0.18, _uneven),
    "rollouts": (0.1, _rollouts),
    "a pause each hour": (0.08, _hourly),
    "another job": (0.14, _changed),
    "no optimizer": (0.04, _evaluating),
    "a rank restarts": (0.06, _restarting),
}
"""The ratio of the runs, and what is changed in them."""


# Faults


def _late(scene: Scene, draw: Draw, choose: Choose, phase: str = "") -> Scene:
    """Return a run with ranks that are late in each step."""
    phases = {phase: 1.0} if phase else COMPUTE if draw.random() < 0.6 else {"other": 1.0}
    ranks = choose(scene.plan.ranks, draw)
    scene = scene.with_truth(kinds=("straggler",), ranks=ranks, causes=tuple(phases))
    return scene.with_fault(Mode((Extra(phases, scene.plan.dose - 1, ranks),)))


def _one(ranks: int, draw: Draw) -> tuple[int, ...]:
    return (int(draw.integers(1, ranks)),)


def _some(ranks: int, draw: Draw, least: float, most: float) -> tuple[int, ...]:
    """Return a number of ranks between these ratios of all, consecutive or not."""
    count = int(draw.integers(round(least * ranks), min(round(most * ranks), ranks - 1) + 1))
    first = int(draw.integers(ranks - count + 1))
    chosen = range(first, first + count) if draw.random() < 0.5 else draw.permutation(ranks)[:count].tolist()
    return tuple(sorted(chosen))


def _set(scene: Scene, draw: Draw, least: float, most: float) -> Scene:
    sizes = (4, 8, 16) if least >= 0.5 else (8, 16)
    return _late(_of_size(scene, draw, *sizes), draw, partial(_some, least=least, most=most))


def _node(scene: Scene, draw: Draw) -> Scene:
    scene, node = replace(_of_size(scene, draw, 4, 8, 16), nodes=2), int(draw.integers(2))
    return _late(scene, draw, lambda ranks, _: tuple(range(node * ranks // 2, (node + 1) * ranks // 2)))


def _stage(scene: Scene, draw: Draw) -> Scene:
    scene = replace(_of_size(scene, draw, 8, 16), stages=int(draw.choice([2, 4])))
    late = _late(scene, draw, lambda _, draw: tuple(scene.peers[int(draw.integers(scene.stages))]))
    return late.with_truth(kinds=("stage_imbalance",))


def _place(scene: Scene, draw: Draw, is_expert: bool) -> Scene:
    """Return a run with one place of context or expert parallelism that has more work in each replica."""
    size = int(draw.choice([2, 4]))
    place = int(draw.integers(size))
    late = _late(_of_size(scene, draw, 8, 16), draw, lambda ranks, _: tuple(range(place, ranks, size)), "forward")
    return replace(late, experts=late.truth.ranks).with_truth(causes=("expert_imbalance",)) if is_expert else late


def _all(scene: Scene, _: Draw, phases: Mapping[str, float], kind: str) -> Scene:
    """Return a run whose ranks all spend more time in these phases."""
    plan, gpus = scene.plan, tuple(range(scene.plan.ranks))
    mode = Mode((Extra(phases, plan.dose - 1, gpus),))
    if kind == "throttling":
        mode = replace(mode, throttled=gpus, clock=1 / plan.dose)
    causes = ("cpu" if plan.computing > 0.5 else "io",) if kind == "data" else ()
    return scene.with_truth(kinds=(kind,), causes=causes).with_fault(mode)


def _network(scene: Scene, _: Draw) -> Scene:
    transfer = 1 + (scene.plan.dose - 1) * (1 + scene.plan.transfer) / scene.plan.transfer
    return scene.with_truth(kinds=("network",), causes=("network",)).with_fault(Mode(transfer=transfer))


def _in_turn(scene: Scene, draw: Draw) -> Scene:
    scene, phase = _of_size(scene, draw, 4, 8, 16), str(draw.choice(["forward", "other"]))
    extra = Extra({phase: 1.0}, scene.plan.dose - 1, tuple(range(scene.plan.ranks)), in_turn=True)
    causes = ("uneven_work",) if phase == "forward" else (phase,)
    return scene.with_truth(kinds=("rotating_straggler",), causes=causes).with_fault(Mode((extra,)))


def _pause_in_turn(scene: Scene, draw: Draw) -> Scene:
    ranks = tuple(draw.permutation(scene.plan.ranks).tolist())
    extra = Extra({"other": 1.0}, 20 * (scene.plan.dose - 1), ranks, every=20, in_turn=True)
    return scene.with_truth(kinds=("rotating_straggler",), causes=("spikes",)).with_fault(Mode((extra,)))


def _each_nth(scene: Scene, draw: Draw) -> Scene:
    every, rank = int(draw.choice([10, 20, 50, 100])), int(draw.integers(scene.plan.ranks))
    mode = Mode((Extra({"other": 1.0}, every * (scene.plan.dose - 1), (rank,), every),))
    seconds = mode.extras[0].ratio * scene.plan.step
    return scene.with_truth(kinds=_alone_for(seconds), ranks=(rank,), causes=("other",)).with_fault(mode)


def _alone_for(seconds: float) -> tuple[str, ...]:
    """Return the kinds of findings about a rank that works alone again and again: the first time, it may hang."""
    return ("straggler", "hang") if seconds > Thresholds().stuck_floor else ("straggler",)


def _alone(scene: Scene, draw: Draw, seconds: float, every: float) -> Scene:
    """Return a run in which one rank works by itself for so long, again and again."""
    rank = int(draw.integers(scene.plan.ranks))
    times = np.arange(scene.truth.begins, scene.truth.ends, every).tolist()
    events = tuple(SimulatedEvent("other", at, seconds * draw.uniform(0.9, 1.1), rank) for at in times)
    return scene.planned(events=events).with_truth(kinds=_alone_for(seconds), ranks=(rank,), causes=("other",))


def _hot(scene: Scene, draw: Draw) -> Scene:
    """Return a run with a GPU that is throttled for 30 s of each ten minutes."""
    rank = int(draw.integers(scene.plan.ranks))
    mode = Mode((Extra(COMPUTE, scene.plan.dose - 1, (rank,)),), throttled=(rank,), clock=1 / scene.plan.dose)
    times = np.arange(scene.truth.begins, scene.truth.ends, 10 * MINUTE).tolist()
    modes = ((0.0, USUAL), *(one for at in times for one in ((at, mode), (at + 30.0, USUAL))))
    return replace(scene, modes=modes).with_truth(kinds=("straggler",), ranks=(rank,), causes=("throttled",))


def _slow_and_restarting(scene: Scene, draw: Draw) -> Scene:
    scene = _restarting(_of_size(scene, draw, 4, 8), draw)
    return _late(scene, draw, lambda *_: (int(scene.plan.events[0].rank or 0) - 1,))


def _hang(scene: Scene, draw: Draw) -> Scene:
    rank, phase = int(draw.integers(scene.plan.ranks)), str(draw.choice(["other", "data_wait", "forward"]))
    event = SimulatedEvent(phase, scene.truth.begins, scene.truth.ends - scene.truth.begins, rank)
    return scene.planned(events=(event,)).with_truth(kinds=("hang",), ranks=(rank,), causes=(phase,))


def _slow_startup(scene: Scene, draw: Draw) -> Scene:
    startup = draw.uniform(20, 28) * MINUTE
    scene = scene.planned(seconds=startup + 10 * MINUTE).with_truth(kinds=("slow_startup",), begins=0.0, ends=startup)
    return replace(scene, startup=startup)


FAULTS: dict[str, Callable[[Scene, Draw], Scene]] = {
    "one rank is slow": partial(_late, choose=_one),
    "a few ranks are slow": partial(_set, least=0.25, most=0.4),
    "half of the ranks are slow": partial(_set, least=0.5, most=0.5),
    "most ranks are slow": partial(_set, least=0.6, most=0.9),
    "a node is slow": _node,
    "a stage is slow": _stage,
    "a context place is slow": partial(_place, is_expert=False),
    "an expert place is slow": partial(_place, is_expert=True),
    "rank 0 works": partial(_late, choose=lambda *_: (0,), phase="other"),
    "slow loaders": partial(_all, phases={"data_wait": 1.0}, kind="data"),
    "slow copies": partial(_all, phases={"h2d_copy": 1.0}, kind="copies"),
    "throttled GPUs": partial(_all, phases=COMPUTE, kind="throttling"),
    "slow network": _network,
    "ranks are late in turn": _in_turn,
    "late in each n-th step": _each_nth,
    "slow, and another rank restarts": _slow_and_restarting,
    "throttled 30 s each 10 min": _hot,
    "alone for 20 s a minute": partial(_alone, seconds=20.0, every=MINUTE),
    "alone for a tenth of each hour": partial(_alone, seconds=6 * MINUTE, every=HOUR),
    "hang": _hang,
    "slow start-up": _slow_startup,
    "ranks pause in turn": _pause_in_turn,
}
WITHIN = {
    *((fault, 1.05) for fault in FAULTS),
    *(("ranks are late in turn", dose) for dose in (1.1, 1.15)),
    ("most ranks are slow", 1.1),
}
"""Doses that are not beyond their allowance by a tenth. It is 7%, for ranks that are late in turn with what they are by
chance (2 to 6%), and the few ranks that wait for most others cost less than 3% of the GPU time."""
SHORT_STEPS = (
    *("late in each n-th step", "slow, and another rank restarts", "throttled 30 s each 10 min"),
    *("alone for 20 s a minute", "alone for a tenth of each hour", "ranks pause in turn"),
)
DOSES_OF = {"ranks pause in turn": (1.3, 2.0), "throttled 30 s each 10 min": (2.0,), "alone for 20 s a minute": (1.5,)}
DOSES_OF |= dict.fromkeys(("alone for a tenth of each hour", "hang", "slow start-up"), (1.0,))
LASTS = {
    "throttled 30 s each 10 min": HOUR,
    "alone for 20 s a minute": HOUR,
    "ranks pause in turn": 2 * HOUR,
    "alone for a tenth of each hour": 5 * HOUR,
}
"""Seconds, if not half an hour."""
