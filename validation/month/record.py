"""An exporter's values of a run at each scrape: its steps counted, aligned, and measured on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from validation.month.plan import RANKS_PER_NODE, Plan
from validation.month.steps import BEGAN, PHASES, WAIT, Array, Block, P, Start, timeline

from rankscope.record.sampling import is_sampled

SCRAPE = 15.0  # seconds
CAUSES = [number for name, number in P.items() if name not in ("collective_wait", "startup")]
UNKNOWN = len(PHASES)
Peers = Sequence[Sequence[int]]
"""Groups of ranks that are compared with each other."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MEASURED_EVERY = 1.2
"""Seconds between two steps that are measured on a device: a dozen marks (rankscope/timeline/device_clock.py)."""
REFERENCE_EVERY = 2 * SCRAPE
"""Seconds between two reference steps."""


@dataclass
class Record:
    """The values at each scrape; counters start with the job's last start. The first axis is the scrapes."""

    times: Array
    seconds: Array
    """Seconds by phase and rank, up to the scrape."""
    phase: Array
    """The current phase by rank."""
    since: Array
    """The start of the current phase by rank."""
    steps: Array
    started: Array
    up: Array
    measured_steps: Array
    measured: Array
    """Seconds of the device by phase and rank."""
    floor: Array
    """Seconds of aligned steps by rank, as `skew`."""
    skew: Array
    blame: Array
    """Seconds by phase (or unknown) and rank."""
    reference: Array
    reference_seconds: Array
    """Seconds by phase and rank in the reference step."""
    collected: Array
    """Seconds of garbage collections by rank."""
    histogram: Array
    """Steps by bucket."""
    checkpoint: Array
    """The end of the last checkpoint."""
    checkpoints: Array
    """The number of ended checkpoints."""
    clock: Array
    """The GPUs' clock as a ratio of the highest."""


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
        started=np.full(scrapes, BEGAN),
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
        checkpoints=np.ones(scrapes),
        clock=np.ones(scrapes),
    )


class _Totals:
    """The sums of all steps of a job before a block."""

    def __init__(self, plan: Plan) -> None:
        self.seconds = np.zeros((len(PHASES), plan.ranks))
        self.measured = np.zeros_like(self.seconds)
        self.measured_steps = 0.0
        self.floor, self.skew, self.collected = (np.zeros(plan.ranks) for _ in range(3))
        self.blame = np.zeros((len(PHASES) + 1, plan.ranks))
        self.histogram = np.zeros(len(BUCKETS) + 1)
        self.reference, self.reference_seconds = 0.0, np.zeros_like(self.seconds)


def simulate(plan: Plan) -> Record:
    """Return the record of a plan."""
    record, totals = _empty(plan), _Totals(plan)
    for part in timeline(plan):
        if isinstance(part, Start):
            totals = _Totals(plan)
            totals.seconds[P["startup"]] = part.trains - part.began
            _start(record, part)
        else:
            _fill_block(plan, record, totals, part)
    for begins, ends, held in plan.caps:
        record.clock[(record.times >= begins) & (record.times < ends)] = 1 - held
    if plan.fault == "throttled GPUs":
        record.clock[(record.times >= plan.onset) & (record.times < plan.heals)] = 1 / plan.dose
    return record


def _start(record: Record, start: Start) -> None:
    record.up[(record.times >= start.ended) & (record.times < start.began)] = False
    starting = (record.times >= start.began) & (record.times < start.trains)
    record.started[record.times >= start.began] = start.began
    record.phase[starting] = P["startup"]
    record.since[starting] = start.began
    record.seconds[starting, P["startup"]] = (record.times[starting] - start.began)[:, None]


def _fill_block(plan: Plan, record: Record, totals: _Totals, block: Block) -> None:
    """Fill the scrapes within a block, and add the block to the totals."""
    scrapes = np.flatnonzero((record.times >= block.begins[0]) & (record.times < block.until))
    steps = np.searchsorted(block.begins, record.times[scrapes], side="right") - 1
    offset = (record.times[scrapes] - block.begins[steps])[:, None, None]
    inside = block.durations[steps]
    from_ = np.cumsum(inside, axis=1) - inside
    cumulated = _before(block.durations)
    record.seconds[scrapes] = totals.seconds + cumulated[steps] + np.clip(offset - from_, 0, inside)
    record.phase[scrapes] = np.argmax(offset < from_ + inside, axis=1)
    since = np.take_along_axis(from_, record.phase[scrapes][:, None], 1)[:, 0]
    record.since[scrapes] = block.begins[steps][:, None] + since
    record.steps[scrapes] = block.first + steps
    record.started[scrapes] = block.began
    for ended in block.checkpoints:
        record.checkpoint[record.times >= ended] = ended
        record.checkpoints[record.times >= ended] += 1
    totals.seconds += block.durations.sum(axis=0)
    _collect(record, totals, scrapes, steps, block.collected)
    _count(record, totals, scrapes, steps, block.durations[:, :, 0].sum(axis=1))
    _measure(plan, record, totals, scrapes, steps, block)


def _before(values: Array) -> Array:
    """Return the sums of the steps before each step."""
    return np.cumsum(values, axis=0) - values


def _collect(record: Record, totals: _Totals, scrapes: Array, steps: Array, collected: Array) -> None:
    record.collected[scrapes] = totals.collected + _before(collected)[steps]
    totals.collected += collected.sum(axis=0)


def _count(record: Record, totals: _Totals, scrapes: Array, steps: Array, lengths: Array) -> None:
    below = np.column_stack([*(lengths <= bound for bound in BUCKETS), np.ones(len(lengths))])
    record.histogram[scrapes] = totals.histogram + _before(below)[steps]
    totals.histogram += below.sum(axis=0)


def _measure(plan: Plan, record: Record, totals: _Totals, scrapes: Array, steps: Array, block: Block) -> None:
    """Fill aligned steps: all of them if measured on the host, some if on the device."""
    length = plan.step * (1 + plan.transfer)
    is_measured = np.ones(len(block.numbers), bool)
    if plan.clock == "device":
        is_measured = _sampled(block.numbers, round(np.log2(max(MEASURED_EVERY / length, 1))))
    weights = is_measured.astype(float)
    nodes = np.arange(plan.ranks).reshape(-1, RANKS_PER_NODE).tolist()
    floor, skew, blame = align(block.durations, nodes)
    values = {"measured": block.durations, "measured_steps": np.ones(len(weights)), "floor": floor, "skew": skew}
    for name, of_steps in {**values, "blame": blame}.items():
        counted = of_steps * weights.reshape(-1, *[1] * (of_steps.ndim - 1))
        getattr(record, name)[scrapes] = getattr(totals, name) + _before(counted)[steps]
        setattr(totals, name, getattr(totals, name) + counted.sum(axis=0))
    level = max(0, int(np.ceil(np.log2(REFERENCE_EVERY / length))))
    _fill_last(record, totals, scrapes, steps, block, is_measured & _sampled(block.numbers, level))


def _sampled(numbers: Array, level: int) -> Array:
    """Return which steps are sampled, as hook and exporter choose them."""
    return np.array([is_sampled(number, level) for number in numbers.tolist()])


def align(durations: Array, peers: Peers) -> tuple[Array, Array, Array]:
    """Return floor, skew and blame by step and rank, blame also by phase (rankscope_exporter/ranks/step_alignment.py).

    The floor is the least wait of any peer, the skew this rank's wait above it, the blame the others' wait for it.
    """
    steps, _, ranks = durations.shape
    floor, skew = np.empty((2, steps, ranks), durations.dtype)
    blame = np.zeros((steps, UNKNOWN + 1, ranks), durations.dtype)
    for members in peers:
        of_peers = durations[:, :, members]
        waits = of_peers[:, WAIT]
        least, last = waits.min(axis=1, keepdims=True), waits.argmin(axis=1)
        floor[:, members], skew[:, members] = least, waits - least
        waited = (waits - least).sum(axis=1) / (len(members) - 1)
        cause = _late_phase(of_peers[:, CAUSES], last, waited)
        blame[np.arange(steps), cause, np.array(members)[last]] = waited
    return floor, skew, blame


def _late_phase(durations: Array, last: Array, waited: Array) -> Array:
    """Return by step the phase in which the last rank exceeds the median of the others most, if that is enough."""
    others = durations.shape[2] - 1
    own = np.take_along_axis(durations, last[:, None, None], axis=2)[..., 0]
    ordered = np.sort(durations, axis=2)
    # Without its own duration, the later ones move up by one.
    middle = [
        np.where(own <= ordered[..., i], ordered[..., i + 1], ordered[..., i]) for i in ((others - 1) // 2, others // 2)
    ]
    excess = own - (middle[0] + middle[1]) / 2
    largest = excess.argmax(axis=1)
    explains = np.take_along_axis(excess, largest[:, None], axis=1)[:, 0] >= waited / 2
    return np.where(explains, np.array(CAUSES)[largest], UNKNOWN)


def _fill_last(record: Record, totals: _Totals, scrapes: Array, steps: Array, block: Block, is_chosen: Array) -> None:
    """Fill the last chosen step that is over, at each scrape."""
    chosen = np.flatnonzero(is_chosen)
    found = np.searchsorted(chosen, steps, side="left") - 1
    for scrape, index in zip(scrapes, found, strict=True):
        if index >= 0:
            record.reference[scrape] = block.numbers[chosen[index]]
            record.reference_seconds[scrape] = block.durations[chosen[index]]
        else:
            record.reference[scrape] = totals.reference
            record.reference_seconds[scrape] = totals.reference_seconds
    if len(chosen):
        totals.reference, totals.reference_seconds = block.numbers[chosen[-1]], block.durations[chosen[-1]]
