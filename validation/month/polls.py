"""Readings of a simulated run, as an exporter on its node reads it once a second, for the diagnosis package."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from validation.month.plan import Plan
from validation.month.record import BUCKETS, MEASURED_EVERY, align
from validation.month.steps import BLOCK, PHASES, WAIT, Array, Block, P, Start, timeline

from rankscope.record.phases import PLANNED
from rankscope.record.sampling import is_sampled
from rankscope_exporter.diagnosis.detectors import rotating
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    Counters,
    GpuCounters,
    GpuReading,
    RankReading,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

POLL, QUIET_POLL = 1.0, 15.0  # seconds
MARGIN = 0.8  # ratio of the least loss that alerts
LONG_PAUSE = 20.0  # seconds: half of the shortest hang
BEFORE, AFTER = 60.0, 60.0  # seconds around losses near the limit
PLANNED_NUMBERS = [P[phase] for phase in PLANNED]
NAMES = [*PHASES, "unknown"]
Moment = tuple[float, Mapping[int, RankReading]]


def polls(plan: Plan, is_whole: bool = True) -> Iterator[Moment]:
    """Yield all ranks' readings once a second; if not whole, once in QUIET_POLL where no loss is near the limit."""
    totals, critical = _Totals(plan.ranks), _CriticalTimes(plan)
    when, throttled = 0.0, _Throttled(plan)
    for part, following in pairwise([*timeline(plan), None]):
        if not is_whole:
            critical.scan(part, following)
        if isinstance(part, Start):
            totals = _Totals(plan.ranks)
            while when < part.trains:
                if when >= part.began:
                    yield when, _starting(plan, part, when, throttled)
                when += POLL
            totals.seconds[P["startup"]] = part.trains - part.began
            continue
        shown = _BlockPolls(plan, totals, part)
        while when < min(part.until, plan.seconds):
            yield when, shown.at(when, throttled)
            when += POLL if is_whole or critical.is_near(when) else QUIET_POLL
        shown.finish()


class _CriticalTimes:
    """The times at which a loss near the limit of an alert, or a hang, is near."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._limits = plan, Thresholds()
        self._baselines: deque[Array] = deque(maxlen=5)
        self._near: list[tuple[float, float]] = [(0.0, 2 * BLOCK)]
        self._scanned_until = 0.0

    def is_near(self, when: float) -> bool:
        """Return whether every second matters at this time."""
        self._near = [(begins, ends) for begins, ends in self._near if ends > when]
        return any(begins <= when for begins, ends in self._near)

    def scan(self, *parts: Start | Block | None) -> None:
        """Find the times in these parts; parts that were scanned before are skipped."""
        for part in parts:
            if isinstance(part, Start):
                self._near.append((part.ended - BEFORE, part.trains + 2 * BLOCK))
            elif part is not None and part.begins[0] >= self._scanned_until:
                self._scanned_until = part.until
                self._scan(part)

    def _scan(self, block: Block) -> None:
        losses, begins = self._losses(block)
        limits = self._limits
        in_turn = rotating.wait_by_chance(limits, self._plan.ranks)
        most = [0.0, limits.network_allowance, in_turn, *[limits.allowance] * 3]
        baseline = np.min(self._baselines, axis=0) * 0.9 if self._baselines else np.zeros(len(losses))
        reached = (losses - np.minimum(most, baseline)[:, None] > MARGIN * limits.loss).any(axis=0)
        longest = block.durations.max(axis=(1, 2))
        moments = [*begins[reached], *block.begins[longest > LONG_PAUSE]]
        seconds = {when: longest[np.searchsorted(block.begins, when, side="right") - 1] for when in moments}
        self._near += [(when - BEFORE, when + long + AFTER) for when, long in seconds.items()]
        self._near = _merged(self._near)
        self._baselines.append(np.quantile(losses, 0.25, axis=1))

    def _losses(self, block: Block) -> tuple[Array, Array]:
        """Return the losses over the shortest span by step: lag, transfer, waiting, data, copies, throttling."""
        durations = block.durations
        length = durations.sum(axis=1).max(axis=1)
        waits = durations[:, WAIT]
        floor = waits.min(axis=1)
        lag = (np.median(waits, axis=1, keepdims=True) - waits).max(axis=1)
        data, copies = (durations[:, P[name]].mean(axis=1) for name in ("data_wait", "h2d_copy"))
        capped = np.zeros(len(length))
        for begins, ends, part in self._plan.caps:
            capped[(block.begins >= begins - BLOCK) & (block.begins < ends + BLOCK)] = part
        seconds = np.stack((lag, floor, waits.mean(axis=1) - floor, data, copies, capped * length))
        steps = min(max(12, int(np.ceil(8.0 / length.mean()))), len(length))
        sums = np.stack([np.convolve(one, np.ones(steps), "valid") for one in seconds])
        return sums / np.convolve(length, np.ones(steps), "valid"), block.begins[: len(length) - steps + 1]


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begins, ends in sorted(intervals):
        if found and begins <= found[-1][1]:
            found[-1] = found[-1][0], max(ends, found[-1][1])
        else:
            found.append((begins, ends))
    return found


class _Totals:
    """The sums of the steps before a block."""

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
    """The seconds with reduced clocks, and the integral of the clock ratio, up to a time."""

    def __init__(self, plan: Plan) -> None:
        self._caps = list(plan.caps)
        if plan.fault == "throttled GPUs":
            self._caps.append((plan.onset, plan.heals, 1.0 - 1.0 / plan.dose))

    def at(self, when: float) -> GpuCounters:
        reduced = [(max(min(when, ends) - begins, 0.0), part) for begins, ends, part in self._caps]
        seconds, lost = sum(spent for spent, _ in reduced), sum(spent * part for spent, part in reduced)
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


class _BlockPolls:
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
            "histogram": np.identity(len(BUCKETS) + 1)[np.searchsorted(BUCKETS, length)],
        }
        self._before = {name: _before(values) + getattr(totals, name) for name, values in self._sums.items()}
        self._seconds = _before(durations) + totals.seconds
        self._from = np.cumsum(durations, axis=1) - durations

    def finish(self) -> None:
        """Add the whole block to the totals."""
        for name, values in self._sums.items():
            setattr(self._totals, name, getattr(self._totals, name) + values.sum(axis=0))
        self._totals.seconds = self._totals.seconds + self._block.durations.sum(axis=0)
        self._totals.checkpoints += len(self._block.checkpoints)
        self._totals.last_checkpoint = max(self._block.checkpoints, default=self._totals.last_checkpoint)

    def at(self, when: float, throttled: _Throttled) -> Mapping[int, RankReading]:
        """Return the readings at a time."""
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
