"""What the ranks of a run do, step by step, and what an exporter would show of it at each scrape.

Training is synchronous: a step ends for all ranks when the slowest has come and the transfer is done; the others wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.month.plan import DAY, HANG, RANKS_PER_NODE, Happening, Plan

from rankscope.sampling import is_sampled

SCRAPE = 15.0  # seconds
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
"""In the order in which a rank goes through them from one collective to the next; the last one before all."""
P = {name: number for number, name in enumerate(PHASES)}
WAIT = P["collective_wait"]
CAUSES = [number for name, number in P.items() if name not in ("collective_wait", "startup")]
UNKNOWN = len(PHASES)
BUSY = [P[name] for name in ("optimizer", "forward", "backward", "collective_wait")]
WORK = {P["forward"]: 0.3, P["backward"]: 0.6, P["optimizer"]: 0.07, P["other"]: 0.03}
"""Parts of a step without transfer."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BLOCK, SHORT_BLOCK = 900.0, 60.0  # seconds that are computed at a time; with a fault, so that it ends when it is healed
WARM_UP = 20  # steps after a start
DOWN = 10.0  # seconds between the end of a job and the start of the next
MEASURED_EVERY = (
    1.2  # seconds between two steps that are measured on a device: a dozen marks (rankscope/device_clock.py)
)
REFERENCE_EVERY = 2 * SCRAPE  # seconds between two reference steps

Array = npt.NDArray[Any]


@dataclass
class Record:
    """What is shown at each scrape; counters from the last start of the job on. The first axis is the scrapes."""

    times: Array
    seconds: Array
    """By phase and rank, up to the moment."""
    phase: Array
    """By rank, the one that it is in."""
    since: Array
    """By rank, from when on."""
    steps: Array
    started: Array
    up: Array
    measured_steps: Array
    measured: Array
    """By phase and rank, of the device's time."""
    floor: Array
    """By rank, as `skew`; seconds of aligned steps."""
    skew: Array
    blame: Array
    """By phase, or unknown, and rank."""
    reference: Array
    reference_seconds: Array
    """By phase and rank, in that step."""
    collected: Array
    """By rank, in garbage collections."""
    histogram: Array
    """Steps by bucket."""
    checkpoint: Array
    """When the last one ended."""
    clock: Array
    """Of the GPUs, in relation to the highest."""


def _empty(plan: Plan) -> Record:
    times = np.arange(0.0, plan.seconds, SCRAPE)
    scrapes, ranks = len(times), plan.ranks
    by_phase = (scrapes, len(PHASES), ranks)
    return Record(
        times,
        seconds=np.zeros(by_phase),
        phase=np.full((scrapes, ranks), P["startup"]),
        since=np.zeros((scrapes, ranks)),
        steps=np.zeros(scrapes),
        started=np.full(scrapes, -3600.0),
        up=np.ones(scrapes, bool),
        measured_steps=np.zeros(scrapes),
        measured=np.zeros(by_phase),
        floor=np.zeros((scrapes, ranks)),
        skew=np.zeros((scrapes, ranks)),
        blame=np.zeros((scrapes, len(PHASES) + 1, ranks)),
        reference=np.zeros(scrapes),
        reference_seconds=np.zeros(by_phase),
        collected=np.zeros((scrapes, ranks)),
        histogram=np.zeros((scrapes, len(BUCKETS) + 1)),
        checkpoint=np.full(scrapes, -600.0),
        clock=np.ones(scrapes),
    )


@dataclass
class _Job:
    """From one start to the next: what has been counted so far."""

    started: float
    steps: int = 0


class _Totals:
    """What all steps before a block amount to."""

    def __init__(self, plan: Plan) -> None:
        self.seconds = np.zeros((len(PHASES), plan.ranks))
        self.measured = np.zeros_like(self.seconds)
        self.measured_steps = 0.0
        self.floor, self.skew, self.collected = (np.zeros(plan.ranks) for _ in range(3))
        self.blame = np.zeros((len(PHASES) + 1, plan.ranks))
        self.histogram = np.zeros(len(BUCKETS) + 1)
        self.reference, self.reference_seconds = 0.0, np.zeros_like(self.seconds)


def simulate(plan: Plan) -> Record:
    """The whole of a plan."""
    record, draw = _empty(plan), np.random.default_rng((17, plan.seed, plan.ranks))
    restarts = [one for one in plan.happenings if one.kind == "restart"]
    pending = [one for one in plan.happenings if one.kind in ("checkpoint", "evaluation", "data_wait", "compilation")]
    now, job, totals = 0.0, _Job(-3600.0), _Totals(plan)
    checkpoint = -600.0
    while now < plan.seconds:
        until = restarts[0].at if restarts else plan.seconds + 1
        if now >= until:
            job, totals = _Job(now + DOWN), _Totals(plan)
            now = _start(record, restarts.pop(0), now)
            totals.seconds[P["startup"]] = now - job.started
            continue
        durations, collected, checkpoint_ends = _block(plan, draw, job, now, pending)
        ends = now + np.cumsum(durations[:, :, 0].sum(axis=1))
        kept = int(np.searchsorted(ends, min(until, plan.seconds + 1))) + 1
        durations, collected, ends = durations[:kept], collected[:kept], ends[:kept]
        _sample(plan, record, totals, job, now, min(ends[-1], until), durations, collected, ends)
        checkpoint = _checkpoints(
            record, now, ends[-1], [one for one in checkpoint_ends if one <= ends[-1]], checkpoint
        )
        job.steps += len(durations)
        now = min(float(ends[-1]), until)
    for begins, ends_at, part in plan.caps:
        record.clock[(record.times >= begins) & (record.times < ends_at)] = 1 - part
    if plan.fault == "throttled GPUs":
        record.clock[(record.times >= plan.onset) & (record.times < plan.heals)] = 1 / plan.dose
    return record


def _start(record: Record, restart: Happening, now: float) -> float:
    """The job has ended; another begins, and is in start-up for a while. Returns when that is over."""
    begins = now + DOWN
    is_down = (record.times >= now) & (record.times < begins)
    record.up[is_down] = False
    starting = (record.times >= begins) & (record.times < begins + restart.seconds)
    record.started[record.times >= begins] = begins
    record.phase[starting] = P["startup"]
    record.since[starting] = begins
    record.seconds[starting, P["startup"]] = (record.times[starting] - begins)[:, None]
    return begins + restart.seconds


def _block(
    plan: Plan, draw: np.random.Generator, job: _Job, now: float, pending: list[Happening]
) -> tuple[Array, Array, list[float]]:
    """Seconds of the next steps, by phase and rank; of each that were garbage collections; when checkpoints ended."""
    factor = _factor(plan, now)
    block = SHORT_BLOCK if plan.fault else BLOCK
    count = max(1, int(block / (plan.step * (factor + plan.transfer))))
    work, collected = _work(plan, draw, job, count)
    transfer = plan.transfer * plan.step * draw.lognormal(0, 0.1, count)
    waiting = plan.data_wait * plan.step * draw.lognormal(0, 0.5, (count, plan.ranks))
    begins = now + np.concatenate(([0.0], np.cumsum((factor * work).max(axis=1) + transfer)[:-1]))
    factors = np.array([_factor(plan, when) for when in begins]) if plan.lengths_over_time else np.ones(count)
    transfer *= 1 + plan.swing * np.sin(2 * np.pi * begins / DAY)
    for from_, until, part in plan.caps:
        factors = np.where((begins >= from_) & (begins < until), factors / (1 - part), factors)
    durations = np.zeros((count, len(PHASES), plan.ranks))
    work = work * factors[:, None]
    for phase, part in WORK.items():
        durations[:, phase] = part * work
    durations[:, P["forward"]] += collected
    durations[:, P["data_wait"]] = waiting
    durations[:, P["h2d_copy"]] = 0.005 * plan.step
    if plan.fault:
        _inject(plan, durations, transfer, begins)
    checkpoint_ends = _happen(durations, transfer, begins, pending)
    own = durations.sum(axis=1)
    durations[:, WAIT] = own.max(axis=1, keepdims=True) - own + transfer[:, None]
    return durations, collected, checkpoint_ends


def _factor(plan: Plan, when: float) -> float:
    """By how much the sequence length of that time makes steps longer."""
    return next((factor for begins, factor in sorted(plan.lengths_over_time, reverse=True) if when >= begins), 1.0)


def _work(plan: Plan, draw: np.random.Generator, job: _Job, count: int) -> tuple[Array, Array]:
    """Seconds of each rank's own work in each step, and of garbage collections in it."""
    shape = (count, plan.ranks)
    work = plan.step * plan.speed * np.exp(draw.standard_normal(shape) * np.hypot(plan.noise, plan.imbalance))
    work *= np.exp(plan.lengths * draw.standard_normal((count, 1)))
    if job.started > 0 and job.steps < WARM_UP:
        numbers = job.steps + np.arange(count)
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
        durations += _as_long_as(plan.dose, durations[is_faulty], transfer[is_faulty], pattern[is_faulty]) * pattern


def _spread(plan: Plan, pattern: Array, durations: Array) -> None:
    """Where the time goes that a fault takes, in relation."""
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


def _as_long_as(dose: float, durations: Array, transfer: Array, pattern: Array) -> float:
    """How much of the pattern makes the steps so many times as long: who is late anyhow hides a part of it."""
    own, extra = durations.sum(axis=1), pattern.sum(axis=1)
    wanted = dose * (own.max(axis=1) + transfer).mean()
    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        is_less = ((own + middle * extra).max(axis=1) + transfer).mean() < wanted
        low, high = (middle, high) if is_less else (low, middle)
    return high


def _happen(durations: Array, transfer: Array, begins: Array, pending: list[Happening]) -> list[float]:
    """Put what happens within this block into the step that it falls into; returns when checkpoints ended."""
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


def _checkpoints(record: Record, now: float, until: float, ended: list[float], before: float) -> float:
    inside = (record.times >= now) & (record.times < until)
    for when in np.flatnonzero(inside):
        record.checkpoint[when] = max([before, *(one for one in ended if one <= record.times[when])])
    return max([before, *ended])


def _sample(
    plan: Plan,
    record: Record,
    totals: _Totals,
    job: _Job,
    now: float,
    until: float,
    durations: Array,
    collected: Array,
    ends: Array,
) -> None:
    """The scrapes within a block, and the totals after it."""
    begins = np.concatenate(([now], ends[:-1]))
    scrapes = np.flatnonzero((record.times >= now) & (record.times < until))
    steps = np.searchsorted(begins, record.times[scrapes], side="right") - 1
    offset = (record.times[scrapes] - begins[steps])[:, None, None]
    inside = durations[steps]
    from_ = np.cumsum(inside, axis=1) - inside
    cumulated = _before(durations)
    record.seconds[scrapes] = totals.seconds + cumulated[steps] + np.clip(offset - from_, 0, inside)
    record.phase[scrapes] = np.argmax(offset < from_ + inside, axis=1)
    record.since[scrapes] = begins[steps][:, None] + np.take_along_axis(from_, record.phase[scrapes][:, None], 1)[:, 0]
    record.steps[scrapes] = job.steps + steps
    record.started[scrapes] = job.started
    totals.seconds += durations.sum(axis=0)
    _collect(record, totals, scrapes, steps, collected)
    _count(record, totals, scrapes, steps, ends - begins)
    _measure(plan, record, totals, job, scrapes, steps, durations)


def _before(values: Array) -> Array:
    """What the steps before each amount to."""
    return np.cumsum(values, axis=0) - values


def _collect(record: Record, totals: _Totals, scrapes: Array, steps: Array, collected: Array) -> None:
    record.collected[scrapes] = totals.collected + _before(collected)[steps]
    totals.collected += collected.sum(axis=0)


def _count(record: Record, totals: _Totals, scrapes: Array, steps: Array, lengths: Array) -> None:
    below = np.column_stack([*(lengths <= bound for bound in BUCKETS), np.ones(len(lengths))])
    record.histogram[scrapes] = totals.histogram + _before(below)[steps]
    totals.histogram += below.sum(axis=0)


def _measure(
    plan: Plan, record: Record, totals: _Totals, job: _Job, scrapes: Array, steps: Array, durations: Array
) -> None:
    """Steps laid side by side: all of them by the host's clock, some by the device's."""
    length = plan.step * (1 + plan.transfer)
    numbers = job.steps + np.arange(len(durations))
    is_measured = np.ones(len(durations), bool)
    if plan.clock == "device":
        is_measured = _sampled(numbers, round(np.log2(max(MEASURED_EVERY / length, 1))))
    weights = is_measured.astype(float)
    measured = durations * weights[:, None, None]
    record.measured[scrapes] = totals.measured + _before(measured)[steps]
    record.measured_steps[scrapes] = totals.measured_steps + _before(weights)[steps]
    totals.measured += measured.sum(axis=0)
    totals.measured_steps += weights.sum()
    floor, skew, blame = align(durations)
    for name, values in (("floor", floor), ("skew", skew), ("blame", blame)):
        values = values * weights.reshape(-1, *[1] * (values.ndim - 1))
        getattr(record, name)[scrapes] = getattr(totals, name) + _before(values)[steps]
        setattr(totals, name, getattr(totals, name) + values.sum(axis=0))
    _refer(record, totals, scrapes, steps, durations, numbers, is_measured, length)


def _sampled(numbers: Array, level: int) -> Array:
    """As hook and exporter choose."""
    return np.array([is_sampled(number, level) for number in numbers.tolist()])


def align(durations: Array) -> tuple[Array, Array, Array]:
    """By step and rank: what the least waiter of the node waited, what this rank waited beyond that, and, by phase too,
    what the others waited for it (rankscope_exporter/step_alignment.py)."""
    count, _, ranks = durations.shape
    by_node = durations.reshape(count, len(PHASES), -1, RANKS_PER_NODE)
    waits = by_node[:, WAIT]
    floor = waits.min(axis=2, keepdims=True)
    last = waits.argmin(axis=2)[:, :, None]
    waited = (waits - floor).sum(axis=2) / (RANKS_PER_NODE - 1)
    own = np.take_along_axis(by_node[:, CAUSES], last[:, None], axis=3)[..., 0]
    lower, upper = np.moveaxis(np.sort(by_node[:, CAUSES], axis=3)[..., 3:5], 3, 0)
    excess = own - np.where(own <= lower, upper, lower)  # the median of the seven others
    largest = excess.argmax(axis=1)
    explains = np.take_along_axis(excess, largest[:, None], axis=1)[:, 0] >= waited / 2
    cause = np.where(explains, np.array(CAUSES)[largest], UNKNOWN)
    blame = np.zeros((count, len(PHASES) + 1, by_node.shape[2], RANKS_PER_NODE))
    step, node = np.indices(cause.shape)
    blame[step, cause, node, last[..., 0]] = waited
    return (
        np.broadcast_to(floor, waits.shape).reshape(count, ranks),
        (waits - floor).reshape(count, ranks),
        blame.reshape(count, -1, ranks),
    )


def _refer(
    record: Record,
    totals: _Totals,
    scrapes: Array,
    steps: Array,
    durations: Array,
    numbers: Array,
    is_measured: Array,
    length: float,
) -> None:
    level = max(0, int(np.ceil(np.log2(REFERENCE_EVERY / length))))
    chosen = np.flatnonzero(is_measured & _sampled(numbers, level))
    found = np.searchsorted(chosen, steps, side="left") - 1  # the last that is over
    for scrape, place in zip(scrapes, found, strict=True):
        if place >= 0:
            record.reference[scrape] = numbers[chosen[place]]
            record.reference_seconds[scrape] = durations[chosen[place]]
        else:
            record.reference[scrape] = totals.reference
            record.reference_seconds[scrape] = totals.reference_seconds
    if len(chosen):
        totals.reference, totals.reference_seconds = numbers[chosen[-1]], durations[chosen[-1]]
