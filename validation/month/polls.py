"""A simulated run as an exporter on its node reads it once a second: readings for the diagnosis package."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from validation.month.plan import Plan
from validation.month.record import BUCKETS, MEASURED_EVERY, align
from validation.month.steps import BLOCK, PHASES, WAIT, Array, Block, P, Start, timeline

from rankscope.record.phases import PLANNED
from rankscope.record.sampling import is_sampled
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    Counters,
    GpuCounters,
    GpuReading,
    RankReading,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

POLL, QUIET_POLL = 1.0, 15.0  # seconds
MARGIN = 0.8  # of the least loss that alerts
LONG_PAUSE = 20.0  # seconds: half of the least that is a hang
PLANNED_NUMBERS = [P[phase] for phase in PLANNED]
NAMES = [*PHASES, "unknown"]
Moment = tuple[float, Mapping[int, RankReading]]


def polls(plan: Plan, is_whole: bool = True) -> Iterator[Moment]:
    """Yield the readings of all ranks, once a second; if not whole, once in QUIET_POLL in blocks without any loss."""
    totals, quiet = _Totals(plan.ranks), _Quiet(plan)
    when, throttled = 0.0, _Throttled(plan)
    for part in timeline(plan):
        every = QUIET_POLL if not is_whole and quiet.is_quiet(part) else POLL
        if isinstance(part, Start):
            totals = _Totals(plan.ranks)
            while when < part.trains:
                if when >= part.began:
                    yield when, _starting(plan, part, when, throttled)
                when += every
            totals.seconds[P["startup"]] = part.trains - part.began
            continue
        shown = _Shown(plan, totals, part)
        while when < min(part.until, plan.seconds):
            yield when, shown.at(when, throttled)
            when += every
        shown.finish()


class _Quiet:
    """Says of each block whether nothing in it, or in the block before, comes near a loss that alerts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._limits = Thresholds()
        self._usual: deque[Array] = deque(maxlen=5)
        self._was_quiet = False

    def is_quiet(self, part: Start | Block) -> bool:
        if isinstance(part, Start):
            self._was_quiet = False
            return False
        losses = self._losses(part)
        known = np.array(self._usual) if self._usual else np.zeros((1, len(losses)))
        allowed = np.minimum(self._allowed(), known.min(axis=0) * 0.9)
        is_quiet = self._pauses(part) < LONG_PAUSE and len(self._usual) == self._usual.maxlen
        is_quiet = is_quiet and bool((losses.max(axis=1) - allowed < MARGIN * self._limits.loss).all())
        self._usual.append(np.quantile(losses, 0.25, axis=1))
        was_quiet, self._was_quiet = self._was_quiet, is_quiet
        return is_quiet and was_quiet

    def _allowed(self) -> Array:
        limits = self._limits
        usual = limits.allowance
        return np.array([0.0, limits.network_allowance, limits.straggler_allowance, usual, usual, usual])

    def _losses(self, block: Block) -> Array:
        """Return the losses over the shortest span by step: lag, transfer, waiting, data, copies, throttling."""
        durations = block.durations
        length = durations.sum(axis=1).max(axis=1)
        waits = durations[:, WAIT]
        floor = waits.min(axis=1)
        lag = (np.median(waits, axis=1, keepdims=True) - waits).max(axis=1)
        data, copies = (durations[:, P[name]].mean(axis=1) for name in ("data_wait", "h2d_copy"))
        held = np.zeros(len(length))
        for begins, ends, part in self._plan.caps:
            held[(block.begins >= begins - BLOCK) & (block.begins < ends + BLOCK)] = part
        seconds = np.stack((lag, floor, waits.mean(axis=1) - floor, data, copies, held * length))
        steps = min(max(12, int(np.ceil(8.0 / length.mean()))), len(length))
        window = np.ones(steps) / steps
        return np.stack([np.convolve(one, window, "valid") for one in seconds]) / np.convolve(length, window, "valid")

    def _pauses(self, block: Block) -> float:
        """Return the longest time of a rank in one phase: no progress is made in it."""
        return float(block.durations.max())


class _Totals:
    """What the steps before a block amount to."""

    def __init__(self, ranks: int) -> None:
        self.seconds = np.zeros((len(PHASES), ranks))
        self.steps = np.zeros(3)  # aligned, measured on the device, seconds aligned
        self.floor, self.skew, self.collected = (np.zeros(ranks) for _ in range(3))
        self.blame = np.zeros((len(PHASES) + 1, ranks))
        self.phases, self.measured = (np.zeros((len(PHASES), ranks)) for _ in range(2))
        self.histogram = np.zeros(len(BUCKETS) + 1)
        self.checkpoints = 0.0
        self.last_checkpoint: float | None = None


class _Throttled:
    """Seconds that the clocks were held down, and the clock integrated, up to a time."""

    def __init__(self, plan: Plan) -> None:
        self._caps = list(plan.caps)
        if plan.fault == "throttled GPUs":
            self._caps.append((plan.onset, plan.heals, 1.0 - 1.0 / plan.dose))

    def at(self, when: float) -> GpuCounters:
        held = [(max(min(when, ends) - begins, 0.0), part) for begins, ends, part in self._caps]
        seconds, lost = sum(spent for spent, _ in held), sum(spent * part for spent, part in held)
        return GpuCounters(busy=when, throttled={"power": seconds}, clock_ratio_seconds=when - lost)


def _starting(plan: Plan, start: Start, when: float, throttled: _Throttled) -> Mapping[int, RankReading]:
    counters = Counters(phases={"startup": when - start.began}, gpu=throttled.at(when))
    return {
        rank: RankReading(
            rank, when, start.began, "0-7", f"{plan.name}-0", f"GPU-{rank}", plan.ranks, last_progress=start.began,
            phase="startup", phase_since=start.began, gpu=GpuReading(str(rank), 0.6, 1, 0.0), counters=counters,
        )
        for rank in range(plan.ranks)
    }  # fmt: skip


class _Shown:
    """The polls within a block."""

    def __init__(self, plan: Plan, totals: _Totals, block: Block) -> None:
        self._plan, self._totals, self._block = plan, totals, block
        durations = block.durations
        length = durations[:, :, 0].sum(axis=1)
        self._is_device = plan.clock == "device"
        measured = np.ones(len(length), bool)
        if self._is_device:
            level = max(0, int(np.ceil(np.log2(MEASURED_EVERY / length.mean()))))
            measured = np.array([is_sampled(int(number), level) for number in block.numbers])
        is_compared = measured & (durations[:, PLANNED_NUMBERS].sum(axis=(1, 2)) == 0.0)
        floor, skew, blame = align(durations)
        compared = is_compared.astype(float)
        self._sums = {
            "steps": np.stack((compared, measured, compared * length), axis=1),
            "floor": floor * compared[:, None],
            "skew": skew * compared[:, None],
            "blame": blame * compared[:, None, None],
            "phases": durations * compared[:, None, None],
            "measured": durations * measured[:, None, None].astype(float),
            "collected": block.collected,
            "histogram": np.eye(len(BUCKETS) + 1)[np.searchsorted(BUCKETS, length)],
        }
        self._before = {name: _before(values) + getattr(totals, name) for name, values in self._sums.items()}
        self._seconds = _before(durations) + totals.seconds
        self._from = np.cumsum(durations, axis=1) - durations

    def finish(self) -> None:
        """Add all of the block to the totals."""
        for name, values in self._sums.items():
            setattr(self._totals, name, getattr(self._totals, name) + values.sum(axis=0))
        self._totals.seconds = self._totals.seconds + self._block.durations.sum(axis=0)
        self._totals.checkpoints += len(self._block.checkpoints)
        self._totals.last_checkpoint = max(self._block.checkpoints, default=self._totals.last_checkpoint)

    def at(self, when: float, throttled: _Throttled) -> Mapping[int, RankReading]:
        """Return the readings of that time."""
        block, plan = self._block, self._plan
        step = int(np.searchsorted(block.begins, when, side="right")) - 1
        offset = when - block.begins[step]
        begun = self._from[step]
        seconds = self._seconds[step] + np.clip(offset - begun, 0.0, block.durations[step])
        phase = (offset < begun + block.durations[step]).argmax(axis=0)
        since = block.begins[step] + np.take_along_axis(begun, phase[None], 0)[0]
        sums: dict[str, Any] = {name: values[step] for name, values in self._before.items()}
        by_rank = {name: sums[name].T.tolist() for name in ("blame", "phases", "measured")}
        gpu, spent = throttled.at(when), seconds.T.tolist()
        aligned, measured, aligned_seconds = sums["steps"].tolist()
        histogram = tuple(sums["histogram"].tolist())
        checkpoints = self._totals.checkpoints + sum(ended <= when for ended in block.checkpoints)
        last = max((ended for ended in block.checkpoints if ended <= when), default=self._totals.last_checkpoint)
        found = {}
        for rank in range(plan.ranks):
            counters = Counters(
                steps=float(block.first + step),
                phases=dict(zip(PHASES, spent[rank], strict=True)),
                device_steps=measured if self._is_device else 0.0,
                device_phases=dict(zip(PHASES, by_rank["measured"][rank], strict=True)) if self._is_device else {},
                step_buckets=histogram,
                aligned=AlignedCounters(
                    aligned, aligned_seconds, float(sums["floor"][rank]), float(sums["skew"][rank]),
                    dict(zip(NAMES, by_rank["blame"][rank], strict=True)),
                    dict(zip(PHASES, by_rank["phases"][rank], strict=True)),
                ),
                gc_seconds=float(sums["collected"][rank]),
                loader_working=plan.loader * when,
                loader_idle=(1.0 - plan.loader) * when,
                gpu=gpu,
            )  # fmt: skip
            found[rank] = RankReading(
                rank, when, block.began, "0-7", f"{plan.name}-0", f"GPU-{rank}", plan.ranks,
                last_progress=float(since[rank]), phase=PHASES[phase[rank]], phase_since=float(since[rank]),
                checkpoints=checkpoints, last_checkpoint=last, children=4,
                gpu=GpuReading(str(rank), 0.6, 1, 0.0), counters=counters,
            )  # fmt: skip
        return found


def _before(values: Array) -> Array:
    return np.cumsum(values, axis=0) - values
