"""The work of a run's ranks, step by step.

Training is synchronous: a step ends for all ranks when the slowest has arrived and the transfer is done; the others
wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from validation.month.plan import DAY, HANG, Plan, SimulatedEvent

PHASES = (
    "optimizer",
    "other",
    "checkpoint",
    "evaluation",
    "data_wait",
    "h2d_copy",
    "forward",
    "backward",
    "collective_wait",
    "startup",
)
"""Phases in the order of a step, from one collective to the next; the last one is before all steps."""
P = {name: number for number, name in enumerate(PHASES)}
WAIT = P["collective_wait"]
WORK = {P["forward"]: 0.3, P["backward"]: 0.6, P["optimizer"]: 0.07, P["other"]: 0.03}
"""Ratios of a step without transfer."""
BLOCK, SHORT_BLOCK = 900.0, 60.0  # seconds computed at once; short with a fault, so that it ends in time
WARM_UP = 20  # steps after a start
BEGAN = -3600.0  # start of the first job
DOWN = 10.0  # seconds between the end of a job and the start of the next

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Start:
    """The end of a job and the start of another, which is in start-up for a while. Seconds of the run."""

    ended: float
    began: float
    trains: float


@dataclass(frozen=True)
class Block:
    """Steps of a job, one right after the other."""

    began: float
    """The start of their job."""
    first: int
    """The number of the first step, from 0."""
    begins: Array
    """The start of each step."""
    until: float
    """The end of the last step, or of the job within it."""
    durations: Array
    """Seconds by step, phase and rank."""
    collected: Array
    """Seconds of garbage collections by step and rank: a part of `forward`."""
    checkpoints: list[float]
    """The ends of checkpoints."""

    @property
    def numbers(self) -> Array:
        """The numbers of the steps."""
        return self.first + np.arange(len(self.begins))


def timeline(plan: Plan) -> Iterator[Start | Block]:
    """Yield all starts and blocks of a run, in their order."""
    draw = np.random.default_rng((17, plan.seed, plan.ranks))
    restarts = [one for one in plan.events if one.kind == "restart"]
    pending = [one for one in plan.events if one.kind in ("checkpoint", "evaluation", "data_wait", "compilation")]
    now, began, first = 0.0, BEGAN, 0
    while now < plan.seconds:
        until = restarts[0].at if restarts else plan.seconds + 1
        if now >= until:
            start = Start(now, now + DOWN, now + DOWN + restarts.pop(0).seconds)
            yield start
            now, began, first = start.trains, start.began, 0
            continue
        block = _block(plan, draw, began, first, now, until, pending)
        yield block
        first += len(block.begins)
        now = block.until


def _block(
    plan: Plan,
    draw: np.random.Generator,
    began: float,
    first: int,
    now: float,
    until: float,
    pending: list[SimulatedEvent],
) -> Block:
    """Return the next steps, which all begin before `until`."""
    factor = _factor(plan, now)
    block = SHORT_BLOCK if plan.fault else BLOCK
    count = max(1, int(block / (plan.step * (factor + plan.transfer))))
    work, collected = _work(plan, draw, began, first, count)
    transfer = plan.transfer * plan.step * draw.lognormal(0, 0.1, count)
    waiting = plan.data_wait * plan.step * draw.lognormal(0, 0.5, (count, plan.ranks))
    begins = now + np.concatenate(([0.0], np.cumsum((factor * work).max(axis=1) + transfer)[:-1]))
    factors = np.array([_factor(plan, when) for when in begins]) if plan.lengths_over_time else np.ones(count)
    transfer *= 1 + plan.swing * np.sin(2 * np.pi * begins / DAY)
    for capped, freed, part in plan.caps:
        factors = np.where((begins >= capped) & (begins < freed), factors / (1 - part), factors)
    durations = np.zeros((count, len(PHASES), plan.ranks))
    work = work * factors[:, None]
    for phase, part in WORK.items():
        durations[:, phase] = part * work
    durations[:, P["forward"]] += collected
    durations[:, P["data_wait"]] = waiting
    durations[:, P["h2d_copy"]] = 0.005 * plan.step
    if plan.fault:
        _inject(plan, durations, transfer, begins)
    checkpoints = _add_events(durations, transfer, begins, pending)
    own = durations.sum(axis=1)
    durations[:, WAIT] = own.max(axis=1, keepdims=True) - own + transfer[:, None]
    ends = now + np.cumsum(durations[:, :, 0].sum(axis=1))
    kept = int(np.searchsorted(ends, min(until, plan.seconds + 1))) + 1
    durations, collected, ends = durations[:kept], collected[:kept], ends[:kept]
    begins, last = np.concatenate(([now], ends[:-1])), float(ends[-1])
    return Block(
        began, first, begins, min(last, until), durations, collected, [one for one in checkpoints if one <= last]
    )


def _factor(plan: Plan, when: float) -> float:
    """Return the factor of the step time for the sequence length at that time."""
    return next((factor for begins, factor in sorted(plan.lengths_over_time, reverse=True) if when >= begins), 1.0)


def _work(plan: Plan, draw: np.random.Generator, began: float, first: int, count: int) -> tuple[Array, Array]:
    """Return the seconds of each rank's own work in each step, and of garbage collections in it."""
    shape = (count, plan.ranks)
    work = plan.step * plan.speed * np.exp(draw.standard_normal(shape) * np.hypot(plan.noise, plan.imbalance))
    work *= np.exp(plan.lengths * draw.standard_normal((count, 1)))
    if began > 0 and first < WARM_UP:
        numbers = first + np.arange(count)
        slower = 1 + 2 * np.exp(-numbers / 5)[:, None] * draw.lognormal(0, 0.1, shape)
        work *= np.where(numbers[:, None] < WARM_UP, slower, 1)
    collected = np.where(draw.random(shape) < 1 / plan.collect_every, plan.collect * draw.lognormal(0, 0.5, shape), 0.0)
    return work, collected


def _inject(plan: Plan, durations: Array, transfer: Array, begins: Array) -> None:
    is_faulty = (begins >= plan.onset) & (begins < plan.heals)
    if plan.fault == HANG:
        if is_faulty.any() and begins[0] < plan.onset:
            durations[np.argmax(is_faulty), P["other"], plan.culprit] += plan.heals - plan.onset
    elif plan.fault == "slow network":
        transfer[is_faulty] += (plan.dose - 1) * plan.step * (1 + plan.transfer)
    elif is_faulty.any():
        pattern = np.zeros_like(durations)
        _spread(plan, pattern, durations)
        pattern *= is_faulty[:, None, None]
        durations += _scale_for_dose(plan.dose, durations[is_faulty], transfer[is_faulty], pattern[is_faulty]) * pattern


def _spread(plan: Plan, pattern: Array, durations: Array) -> None:
    """Fill the relative pattern in which a fault adds time."""
    if plan.fault == "slow rank":
        pattern[:, P["forward"], plan.culprit] = plan.step / 3
        pattern[:, P["backward"], plan.culprit] = plan.step * 2 / 3
    elif plan.fault == "rank 0 works":
        pattern[:, P["other"], plan.culprit] = plan.step
    elif plan.fault == "slow loaders":
        pattern[:, P["data_wait"]] = plan.step
    elif plan.fault == "slow copies":
        pattern[:, P["h2d_copy"]] = plan.step
    elif plan.fault == "rotating straggler":
        numbers = np.arange(len(durations))
        pattern[numbers, P["forward"], numbers % plan.ranks] = plan.step
    elif plan.fault == "throttled GPUs":
        for phase in ("forward", "backward"):
            pattern[:, P[phase]] = durations[:, P[phase]]


def _scale_for_dose(dose: float, durations: Array, transfer: Array, pattern: Array) -> float:
    """Return the factor of the pattern that makes steps `dose` times as long; a late rank hides a part of it."""
    own, extra = durations.sum(axis=1), pattern.sum(axis=1)
    wanted = dose * (own.max(axis=1) + transfer).mean()
    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        is_less = ((own + middle * extra).max(axis=1) + transfer).mean() < wanted
        low, high = (middle, high) if is_less else (low, middle)
    return high


def _add_events(durations: Array, transfer: Array, begins: Array, pending: list[SimulatedEvent]) -> list[float]:
    """Add the events of this block to their steps. Return the ends of checkpoints."""
    ended = []
    length = durations.sum(axis=1).max(axis=1) + transfer
    begins = begins[0] + np.concatenate(([0.0], np.cumsum(length)[:-1]))
    while pending and pending[0].at < begins[-1] + length[-1]:
        one = pending.pop(0)
        step = max(int(np.searchsorted(begins, one.at, side="right")) - 1, 0)
        phase = P["forward" if one.kind == "compilation" else one.kind]
        if one.rank is None:
            durations[step, phase] += one.seconds
        else:
            durations[step, phase, one.rank] += one.seconds
        begins[step + 1 :] += one.seconds
        if one.kind == "checkpoint":
            ended.append(float(begins[step] + one.seconds))
    return ended
