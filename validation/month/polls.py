"""Readings of a simulated run, as an exporter on its node reads it once a second, for the diagnosis package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import isnan

import numpy as np
from validation.month.plan import Plan
from validation.month.record import BUCKETS, MEASURED_EVERY, align
from validation.month.steps import PHASES, Array, Block, P, Start, timeline

from rankscope.record.phases import PLANNED
from rankscope.record.sampling import is_sampled
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    Counters,
    GpuCounters,
    GpuReading,
    RankReading,
)

PLANNED_NUMBERS = [P[phase] for phase in PLANNED]
NAMES = [*PHASES, "unknown"]
Readings = Mapping[int, RankReading]
Rows = dict[str, Array]


class Polls:
    """The state and the counters of a run at each poll: once a second while its processes live.

    The first axis of each array is the poll. Counters start when the job starts, and are the sums of the steps that are
    over at the poll; only `seconds` includes the current step.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.is_device = plan.clock == "device"
        parts: dict[str, list[Array]] = defaultdict(list)
        for rows in _all_rows(plan):
            for name, values in rows.items():
                parts[name].append(values)
        rows = {name: np.concatenate(values) for name, values in parts.items()}
        self.times, self.began, self.steps = rows["times"], rows["began"], rows["steps"]
        self.seconds, self.phase, self.since = rows["seconds"], rows["phase"], rows["since"]
        """Seconds by phase and rank; the current phase, and its start, by rank."""
        for job in self.jobs():  # a rounding error must not look like a counter that starts again
            np.maximum.accumulate(self.seconds[job], axis=0, out=self.seconds[job])
        self.compared, self.measured_steps, self.compared_seconds = rows["counts"].T
        self.floor, self.skew, self.blame = rows["floor"], rows["skew"], rows["blame"]
        self.phases, self.measured = rows["phases"], rows["measured"]
        """Seconds of compared steps, and of steps that were measured on the device, by phase and rank."""
        self._collected, self._histogram = rows["collected"], rows["histogram"]
        self._checkpoints, self.last_checkpoint = rows["checkpoints"], rows["last_checkpoint"]
        self.throttled, self.clock_seconds = _throttled(plan, self.times)
        """Seconds with reduced clocks, and the integral of the clock as a ratio of its maximum."""

    def __len__(self) -> int:
        return len(self.times)

    def jobs(self) -> list[slice]:
        """Return the polls of each job."""
        starts = np.flatnonzero(np.diff(self.began, prepend=-np.inf)).tolist()
        return [slice(first, end) for first, end in pairwise([*starts, len(self)])]

    def readings(self, poll: int) -> Readings:
        """Return the readings of all ranks."""
        plan, when, began = self._plan, float(self.times[poll]), float(self.began[poll])
        spent, blame, phases = (values[poll].T.tolist() for values in (self.seconds, self.blame, self.phases))
        measured = self.measured[poll].T.tolist() if self.is_device else None
        floor, skew, collected = (values[poll].tolist() for values in (self.floor, self.skew, self._collected))
        phase, since = self.phase[poll].tolist(), self.since[poll].tolist()
        gpu = GpuCounters(when, {"power": float(self.throttled[poll])}, float(self.clock_seconds[poll]))
        compared, compared_seconds = float(self.compared[poll]), float(self.compared_seconds[poll])
        steps, histogram = float(self.steps[poll]), tuple(self._histogram[poll].tolist())
        last = float(self.last_checkpoint[poll])
        found = {}
        for rank in range(plan.ranks):
            counters = Counters(
                steps=steps,
                phases=dict(zip(PHASES, spent[rank], strict=True)),
                device_steps=float(self.measured_steps[poll]) if measured else 0.0,
                device_phases=dict(zip(PHASES, measured[rank], strict=True)) if measured else {},
                step_buckets=histogram,
                aligned=AlignedCounters(
                    compared, compared_seconds, floor[rank], skew[rank],
                    dict(zip(NAMES, blame[rank], strict=True)), dict(zip(PHASES, phases[rank], strict=True)),
                ),
                gc_seconds=collected[rank],
                loader_working=plan.loader * when,
                loader_idle=(1.0 - plan.loader) * when,
                gpu=gpu,
            )  # fmt: skip
            found[rank] = RankReading(
                rank, when, began, "0-7", f"{plan.name}-0", f"GPU-{rank}", plan.ranks,
                last_progress=since[rank], phase=PHASES[phase[rank]], phase_since=since[rank],
                checkpoints=float(self._checkpoints[poll]), last_checkpoint=None if isnan(last) else last, children=4,
                gpu=GpuReading(str(rank), 0.6, 1, 0.0), counters=counters,
            )  # fmt: skip
        return found


def _all_rows(plan: Plan) -> Iterator[Rows]:
    """Yield the rows of each part of the run."""
    totals, when = _zeros(plan.ranks), 0.0
    for part in timeline(plan):
        until = part.trains if isinstance(part, Start) else min(part.until, plan.seconds)
        times = np.arange(when, until)
        when += len(times)
        if isinstance(part, Start):
            totals = _zeros(plan.ranks)
            totals["seconds"][P["startup"]] = part.trains - part.began
            yield _rows_of_start(plan, part, times[times >= part.began])
        else:
            yield _rows_of_block(plan, totals, part, times)


def _zeros(ranks: int) -> Rows:
    """Return the counters of a job that has just started."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("floor", "skew", "collected"), (ranks,))
    shapes |= dict.fromkeys(("seconds", "phases", "measured"), (len(PHASES), ranks))
    shapes |= {"counts": (3,), "blame": (len(NAMES), ranks), "histogram": (len(BUCKETS) + 1,), "checkpoints": ()}
    return {**{name: np.zeros(shape) for name, shape in shapes.items()}, "last_checkpoint": np.array(np.nan)}


def _rows_of_start(plan: Plan, start: Start, times: Array) -> Rows:
    count = len(times)
    rows = {name: np.repeat(values[None], count, axis=0) for name, values in _zeros(plan.ranks).items()}
    rows["seconds"][:, P["startup"]] = (times - start.began)[:, None]
    began, by_rank = np.full(count, start.began), (count, plan.ranks)
    rows |= {"times": times, "began": began, "steps": np.zeros(count)}
    return rows | {"phase": np.full(by_rank, P["startup"]), "since": np.full(by_rank, start.began)}


def _rows_of_block(plan: Plan, totals: Rows, block: Block, times: Array) -> Rows:
    """Return the rows of a block, and add the block to the totals."""
    steps = np.searchsorted(block.begins, times, side="right") - 1
    edges = np.unique(np.concatenate(([0], steps)))
    rows: Rows = {"times": times, "began": np.full(len(times), block.began), "steps": block.first + steps}
    for name, values in _of_steps(plan, block).items():
        sums = totals[name] + np.cumsum(np.add.reduceat(values, edges, axis=0), axis=0)
        rows[name] = np.concatenate((totals[name][None], sums))[np.searchsorted(edges, steps)]
        totals[name] = sums[-1]
    durations, offset = block.durations[steps], times - block.begins[steps]
    begun = np.cumsum(durations, axis=1) - durations
    passed = offset[:, None, None] - begun
    rows["seconds"] = rows["seconds"] + np.clip(passed, 0.0, durations)
    rows["phase"] = (passed < durations).argmax(axis=1)
    rows["since"] = block.begins[steps][:, None] + np.take_along_axis(begun, rows["phase"][:, None], 1)[:, 0]
    ended = np.sort(block.checkpoints)
    count = np.searchsorted(ended, times, side="right")
    rows["checkpoints"] = totals["checkpoints"] + count
    rows["last_checkpoint"] = np.concatenate(([totals["last_checkpoint"]], ended))[count]
    totals["checkpoints"] = totals["checkpoints"] + len(ended)
    totals["last_checkpoint"] = ended[-1] if len(ended) else totals["last_checkpoint"]
    return rows


def _of_steps(plan: Plan, block: Block) -> Rows:
    """Return the increase of the counters in each step."""
    durations = block.durations
    length = durations[:, :, 0].sum(axis=1)
    measured = np.ones(len(length))
    if plan.clock == "device":
        level = max(0, int(np.ceil(np.log2(MEASURED_EVERY / length.mean()))))
        measured = np.array([float(is_sampled(int(number), level)) for number in block.numbers])
    compared = measured * (durations[:, PLANNED_NUMBERS].sum(axis=(1, 2)) == 0.0)
    floor, skew, blame = align(durations)
    return {
        "counts": np.stack((compared, measured, compared * length), axis=1),
        "floor": floor * compared[:, None],
        "skew": skew * compared[:, None],
        "blame": blame * compared[:, None, None],
        "phases": durations * compared[:, None, None],
        "measured": durations * measured[:, None, None],
        "seconds": durations,
        "collected": block.collected,
        "histogram": np.identity(len(BUCKETS) + 1)[np.searchsorted(BUCKETS, length)],
    }


def _throttled(plan: Plan, times: Array) -> tuple[Array, Array]:
    """Return the seconds with reduced clocks, and the integral of the clock ratio, up to each time."""
    caps = list(plan.caps)
    if plan.fault == "throttled GPUs":
        caps.append((plan.onset, plan.heals, 1.0 - 1.0 / plan.dose))
    seconds, clock = np.zeros(len(times)), times.astype(float)
    for begins, ends, part in caps:
        spent = np.clip(times, begins, ends) - begins
        seconds, clock = seconds + spent, clock - spent * part
    return seconds, clock
