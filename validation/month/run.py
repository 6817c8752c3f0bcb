"""A simulated run: its timeline as stretches of repeated steps, and the readings of its ranks at any second."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, lcm, log2
from typing import Any, NamedTuple

import numpy as np
from testing.split_training import sent_level
from validation.month import series as columns
from validation.month.plan import SimulatedEvent
from validation.month.scene import Extra, Mode, Scene
from validation.month.series import NANO, SECONDS, Series
from validation.month.steps import DOWN, PHASES, WAIT, WORK, Array, P

from rankscope.record.phases import NAMES
from rankscope.record.sampling import is_sampled
from rankscope.record.snapshot import DeviceStep, Step
from rankscope_exporter.analyzer.alignment import REMEMBERED
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    CollectiveCounters,
    Counters,
    GpuCounters,
    GpuReading,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.ranks.chosen_steps import AnyStep

Readings = Mapping[int, RankReading]
STEPS, SECONDS_OF_STEPS = 8192, 900.0
"""The steps of a series, and the least seconds that they take; then they repeat. In a shorter series, what happens once
by chance, such as a garbage collection in a measured step, would come several times in the longest span that is judged.
"""
IN_STEPS = frozenset({*PHASES, "compilation", "restart", "rank restart"})
"""Kinds of events that change a run. The others are failed scrapes, which do not concern readings."""
RARE = {"checkpoint": 1, "rank restart": 2, "restart": 3}
"""Of several events in one step, the one with the highest number happens."""
BEFORE, AFTER, AFTER_STEPS = 10.0, 60.0, 15
"""Seconds and steps around a change in which each second is polled."""
NEAR, BEGUN = 4.0, 8.0
"""Seconds around the start and the end of a pause of at least so many, and after its start, when it is a standstill."""
CHILDREN, MICRO_BATCHES = 4, 8
"""Loader workers of a rank, and micro-batches of a pipeline's step."""
RATES, MICRO_STEPS, OF_GPU = 7, 2, slice(4, 6)
"""The number of columns of `rates`, and those of backward passes and of the GPU."""
COMPUTING = [P["forward"], P["backward"]]


class Totals(NamedTuple):
    """Counters of the ranks' processes."""

    by_rank: Array
    common: Array
    rates: Array
    """Bytes, exchanged bytes, backward passes; seconds of a busy loader, of a reduced clock, of the clock's ratio, and
    in which only the host works, as in a compilation."""


class Stretch(NamedTuple):
    """Steps of one mode, one right after the other; without a series a start-up. Times are nanoseconds of the run."""

    begins: int
    ends: int
    mode: Mode
    totals: Totals
    """The sums of the job before it."""
    began: Array
    """The starts of the ranks' processes in seconds."""
    bases: Totals
    """The sums of the job at these starts."""
    series: Series | None = None
    first: int = 0
    """The place of its first step in the series."""
    count: int = 0
    steps: int = 0
    """Steps of the job before it."""
    checkpoints: tuple[float, ...] = ()
    """The ends of checkpoints before it, in seconds."""


class SimulatedRun:
    """A run of a scene, from its start."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.plan = scene, scene.plan
        self.pace = int(max(1.0, min(5.0, self.plan.step / 5)))
        """Seconds between two polls around a change."""
        self._draw = np.random.default_rng((27, zlib.crc32(scene.plan.name.encode())))
        self._usual = self.plan.step * (1 + self.plan.transfer)
        self._is_device = self.plan.clock == "device"
        self._level = round(log2(max(scene.measured_every / self._usual, 1.0))) if self._is_device else 0
        self._after = max(AFTER, AFTER_STEPS * self._usual)
        self._drawn: dict[int, Series] = {}
        self._known_rates: dict[int, Array] = {}
        self._changes: list[tuple[float, float]] = []
        self._stretches: list[Stretch] = []
        if scene.has_optimizer:
            self._train()
        self._begins = [one.begins for one in self._stretches]

    def _train(self) -> None:
        events = [one for one in self.plan.events if one.kind in IN_STEPS]
        (_, mode), *modes = self.scene.modes
        self._start(0.0, self.scene.startup, mode)
        while (now := self._stretches[-1].ends * NANO) < self.plan.seconds:
            if modes and modes[0][0] <= now:
                mode = modes.pop(0)[1]
                self._add_change(now - BEFORE, now + self._after)
            elif due := [one for one in events if one.at <= now]:  # in one step, of which some may take minutes
                self._happen(max(due, key=lambda one: (RARE.get(one.kind, 0), one.seconds)), mode, now)
                events = events[len(due) :]
            else:
                times = self.plan.seconds, *(at for at, _ in modes[:1]), *(one.at for one in events[:1])
                self._add_steps(mode, self._series(mode), min(times))

    def _start(self, at: float, startup: float, mode: Mode) -> None:
        """Start all processes, which compile in their first step."""
        ranks, begins = self.plan.ranks, round(at / NANO)
        kinds: Any = (columns.BY_RANK, np.int64), (columns.COMMON, np.int64), (RATES, np.float64)
        zero = Totals(*(np.zeros((ranks, count), kind) for count, kind in kinds))
        ends = begins + round(startup / NANO)
        self._began, self._bases = np.full(ranks, at), zero
        self._stretches.append(Stretch(begins, ends, mode, zero, self._began, zero))
        self._add_change(at - NEAR, at + NEAR)
        self._happen(SimulatedEvent("compilation", at, self._draw.uniform(1.0, 60.0)), mode, ends * NANO)

    def _add_steps(self, mode: Mode, series: Series, until: float, first: int | None = None) -> None:
        """Add the steps that begin before that time, at least one."""
        last = self._stretches[-1]
        steps = last.steps + last.count
        first = steps % len(series) if first is None else first
        rounds, rest = divmod(int(series.ends[first]) + round(until / NANO) - last.ends, int(series.ends[-1]))
        count = max(rounds * len(series) + int(np.searchsorted(series.ends, rest)) - first, 1)
        ends = last.ends + int(columns.added(series.ends, first, count))
        totals = self._totals(last, last.count, last.ends)
        self._stretches.append(last._replace(
            begins=last.ends, ends=ends, mode=mode, totals=totals, began=self._began, bases=self._bases, series=series,
            first=first, count=count, steps=steps,
        ))  # fmt: skip

    def _happen(self, event: SimulatedEvent, mode: Mode, now: float) -> None:
        """Add the step in which something happens, or a restart of all processes."""
        if event.kind == "restart":
            self._start(now + DOWN, event.seconds, mode)
            return
        if event.kind == "rank restart":
            self._restart_rank(event.rank or 0, now)
        series = self._series(mode)
        last = self._stretches[-1]
        place = (last.steps + last.count) % len(series)
        durations, collected = series.durations[place] * NANO, np.zeros(self.plan.ranks)
        transfer = durations[WAIT].min()
        name = {"compilation": "forward", "rank restart": "startup"}.get(event.kind, event.kind)
        durations[P[name], slice(None) if event.rank is None else event.rank] += event.seconds
        is_measured = np.diff(series.common[place : place + 2, columns.MEASURED_STEPS]) > 0
        one = self._finished(durations[None], collected[None], np.array([transfer]), is_measured)
        if event.kind == "compilation":
            mode = replace(mode, compiles=event.seconds / (int(one.ends[-1]) * NANO))
        self._add_steps(mode, one, now, first=0)
        ends = self._stretches[-1].ends * NANO
        if event.kind == "checkpoint":
            self._stretches[-1] = self._stretches[-1]._replace(checkpoints=(*last.checkpoints, ends))
        if event.kind == "rank restart":
            self._add_change(now - BEFORE, ends + self._after)
        elif event.seconds >= NEAR:
            self._add_change(now - NEAR, now + BEGUN)
            self._add_change(ends - NEAR, ends + (self._after if event.kind == "compilation" else NEAR))

    def _restart_rank(self, rank: int, now: float) -> None:
        """Restart one rank's process: all that it counts begins again, but not its GPU's counters."""
        last = self._stretches[-1]
        totals = self._totals(last, last.count, last.ends)
        self._began, self._bases = self._began.copy(), Totals(*(base.copy() for base in self._bases))
        self._began[rank] = now
        for base, total in zip(self._bases, totals, strict=True):
            base[rank] = total[rank]
        self._bases.rates[rank, OF_GPU] = 0.0

    def _add_change(self, begins: float, ends: float) -> None:
        if self._changes and begins <= self._changes[-1][1]:
            first, last = self._changes.pop()
            begins, ends = first, max(ends, last)
        self._changes.append((begins, ends))

    def _series(self, mode: Mode) -> Series:
        """Return the steps of a mode."""
        if id(mode) not in self._drawn:
            repeats = lcm(2**self._level, *(extra.every for extra in mode.extras))
            step = self.plan.step * mode.work
            wanted = min(max(STEPS, ceil(SECONDS_OF_STEPS / step)), ceil(self.plan.seconds / step))
            count = repeats * ceil(wanted / repeats)
            durations, collected, transfer = self._work(mode, count)
            for extra in mode.extras:
                _spend(durations, extra, self._usual)
            is_measured = np.array([is_sampled(number, self._level) for number in range(count)])
            self._drawn[id(mode)] = self._finished(durations, collected, transfer, is_measured)
        return self._drawn[id(mode)]

    def _finished(self, durations: Array, collected: Array, transfer: Array, is_measured: Array) -> Series:
        """Return the series of these seconds, with the wait of each rank for the last one and the transfer."""
        whole, moved = (np.round(seconds / NANO).astype(np.int64) for seconds in (durations, transfer))
        whole[:, WAIT] = 0
        own = whole.sum(axis=1)
        whole[:, WAIT] = own.max(axis=1, keepdims=True) - own + moved[:, None]
        return Series(whole, np.round(collected / NANO).astype(np.int64), is_measured, self.scene.peers)

    def _work(self, mode: Mode, count: int) -> tuple[Array, Array, Array]:
        """Return the seconds of each rank in each phase, of garbage collections in it, and of the transfer."""
        plan, draw, shape = self.plan, self._draw, (count, self.plan.ranks)
        step = plan.step * mode.work
        work = step * plan.speed * np.exp(draw.standard_normal(shape) * np.hypot(plan.noise, plan.imbalance))
        work *= np.exp(plan.lengths * draw.standard_normal((count, 1)))
        collected = plan.collect * draw.lognormal(0, 0.5, shape) * (draw.random(shape) < 1 / plan.collect_every)
        durations = np.zeros((count, len(PHASES), plan.ranks))
        for phase, part in WORK.items():
            durations[:, phase] = part * work
        durations[:, P["forward"]] += collected
        durations[:, P["data_wait"]] = plan.data_wait * plan.step * draw.lognormal(0, 0.5, shape)
        durations[:, P["h2d_copy"]] = 0.005 * plan.step
        name, ratio, deviation = self.scene.uneven
        if ratio:
            durations[:, P[name]] += ratio * step * draw.lognormal(-(deviation**2) / 2, deviation, shape)
        return durations, collected, mode.transfer * plan.transfer * plan.step * draw.lognormal(0, 0.1, count)

    def is_changing(self, at: float, seconds: float) -> bool:
        """Return whether something changes in the next seconds, or the steps are not as usual."""
        number = bisect_right(self._changes, (at + seconds, inf)) - 1
        if number >= 0 and self._changes[number][1] >= at:
            return True
        stretch = self._stretch(at)
        if stretch is None or stretch.series is None or len(stretch.series) == 1:
            return False  # a single step has an event in it
        series = stretch.series
        begin, end = (self._place(stretch, series, when)[0] for when in (at, at + seconds))
        return bool(columns.added(series.restless, begin % len(series), end - begin + 1))

    def step_end(self, at: float) -> float:
        """Return the end of the step at a time; that time if there is none."""
        stretch = self._stretch(at)
        if stretch is None or (series := stretch.series) is None:
            return at
        steps = self._place(stretch, series, at)[0] + 1 - stretch.first
        return (stretch.begins + int(columns.added(series.ends, stretch.first, steps))) * NANO

    def _stretch(self, at: float) -> Stretch | None:
        """Return the stretch at a time; None while there is no process."""
        number = bisect_right(self._begins, round(at / NANO)) - 1
        return self._stretches[number] if number >= 0 and round(at / NANO) < self._stretches[number].ends else None

    def _place(self, stretch: Stretch, series: Series, at: float) -> tuple[int, int]:
        """Return the place in the repeated series of the step at a time, and the nanoseconds since its start."""
        rounds, rest = divmod(int(series.ends[stretch.first]) + round(at / NANO) - stretch.begins, int(series.ends[-1]))
        step = int(np.searchsorted(series.ends, rest, side="right")) - 1
        return rounds * len(series) + step, rest - int(series.ends[step])

    def _totals(self, stretch: Stretch, steps: int, now: int) -> Totals:
        """Return the sums of the job after so many steps of a stretch."""
        before, passed = stretch.totals, (now - stretch.begins) * NANO
        rates = before.rates + self._rates(stretch.mode) * [steps, steps, steps, passed, passed, passed, passed]
        if (series := stretch.series) is None:
            by_rank = before.by_rank.copy()
            by_rank[:, P["startup"]] = now - stretch.begins
            return Totals(by_rank, before.common, rates)
        by_rank, common = (columns.added(one, stretch.first, steps) for one in (series.by_rank, series.common))
        return Totals(before.by_rank + by_rank, before.common + common, rates)

    def _rates(self, mode: Mode) -> Array:
        """Return what each rank counts in a step, and in a second."""
        if id(mode) in self._known_rates:
            return self._known_rates[id(mode)]
        ranks = np.arange(self.plan.ranks)
        is_throttled = np.isin(ranks, mode.throttled)
        is_late = any("data_wait" in extra.phases for extra in mode.extras)
        has_more = np.isin(ranks, self.scene.experts) & bool(mode.extras)
        exchanged = np.where(has_more, 1.5e7, 1e7) if self.scene.experts else 0.0
        found = self._known_rates[id(mode)] = np.empty((len(ranks), RATES))
        micro_steps = mode.micro_steps * (MICRO_BATCHES if self.scene.stages > 1 else 1)
        found[:] = 1e8 * mode.bytes, 0.0, micro_steps, 1.0 if is_late else self.plan.loader, 0.0, 1.0, mode.compiles
        found[:, 1], found[:, 4], found[:, 5] = exchanged, is_throttled, np.where(is_throttled, mode.clock, 1.0)
        return found

    def readings(self, at: float) -> Readings | None:
        """Return the readings of all ranks; None while there is no process."""
        if not self.scene.has_optimizer:
            return {rank: self._of_evaluation(rank, at) for rank in range(self.plan.ranks)}
        stretch = self._stretch(at)
        if stretch is None:
            return None
        steps, phase, since = 0, np.full(self.plan.ranks, P["startup"]), stretch.began
        if series := stretch.series:
            place, passed = self._place(stretch, series, at)
            steps, durations = place - stretch.first, series.durations[place % len(series)]
            begun = np.cumsum(durations, axis=0) - durations
            phase = (passed - begun < durations).argmax(axis=0)
            since = at - (passed - np.take_along_axis(begun, phase[None], 0)[0]) * NANO
        totals = self._totals(stretch, steps, round(at / NANO))
        if series:
            spent = np.clip(passed - begun, 0, durations)
            totals.by_rank[:, SECONDS] += spent.T
            computed = spent[COMPUTING].sum(axis=0) / durations[COMPUTING].sum(axis=0)
            totals.rates[:, MICRO_STEPS] += np.floor(computed * self._rates(stretch.mode)[:, MICRO_STEPS])
        by_rank, common, rates = ((now - base).tolist() for now, base in zip(totals, stretch.bases, strict=True))
        checkpoints, steps = stretch.checkpoints, stretch.steps + steps
        if checkpoints and checkpoints[-1] > at:
            checkpoints = checkpoints[:-1]
        found = {}
        for rank, counted in enumerate(zip(by_rank, common, rates, strict=True)):
            name, group = PHASES[phase[rank]], f"0-{self.plan.ranks - 1}"
            is_waiting = phase[rank] == WAIT
            found[rank] = RankReading(
                rank, at, float(stretch.began[rank]), group, f"node-{rank * self.scene.nodes // self.plan.ranks}",
                f"GPU-{rank}", self.plan.ranks, last_progress=float(since[rank]),
                phase="device_wait" if is_waiting and self._is_device else name,
                phase_since=float(since[rank]), issued={group: float(steps + is_waiting)},
                checkpoints=float(len(checkpoints)), last_checkpoint=checkpoints[-1] if checkpoints else None,
                children=CHILDREN, stage=self._stage(rank), gpu=GpuReading(str(rank), 0.6, 1, 0.0),
                counters=self._counters(at - float(stretch.began[rank]), *counted),
            )  # fmt: skip
        return found

    def new_steps(self, after: float, until: float) -> dict[int, list[AnyStep]]:
        """Return by rank the steps that ended in this time and that exporters send: the last ones, if they are many."""
        found: dict[int, list[AnyStep]] = {rank: [] for rank in range(self.plan.ranks)}
        level = max(self._level, sent_level(self.plan.ranks, self._usual))
        for stretch in self._stretches[bisect_right(self._begins, round(after / NANO)) - 1 :]:
            if stretch.begins > round(until / NANO):
                break
            if stretch.series is None:
                found = {rank: [] for rank in found}
                continue
            first, last = (
                self._place(stretch, stretch.series, min(max(at, stretch.begins * NANO), stretch.ends * NANO))[0]
                for at in (after, until)
            )
            for place in range(max(first, last - (REMEMBERED << level)), last):
                number = stretch.steps + place - stretch.first
                if is_sampled(number, level):
                    self._add_step(found, stretch, stretch.series, place, number + 1)
        return {rank: steps[-REMEMBERED:] for rank, steps in found.items()}

    def _add_step(
        self, found: Mapping[int, list[AnyStep]], stretch: Stretch, series: Series, place: int, number: int
    ) -> None:
        durations = series.durations[place % len(series)] * NANO
        passed = columns.added(series.ends, stretch.first, place + 1 - stretch.first)
        end, seconds = (stretch.begins + int(passed)) * NANO, float(durations[:, 0].sum())
        for rank, steps in found.items():
            spent = _by_name(PHASES, durations[:, rank].tolist())
            phases = tuple(spent.get(name, 0.0) for name in NAMES)
            device = DeviceStep(number, number, end, number, phases)
            steps.append(device if self._is_device else Step(number, end, seconds, phases))

    def _stage(self, rank: int) -> int | None:
        return rank * self.scene.stages // self.plan.ranks if self.scene.stages > 1 else None

    def _counters(self, passed: float, seconds: list[int], common: list[int], rates: list[float]) -> Counters:
        """Return the counters of one rank, whose process has run for so many seconds."""
        spent = [one * NANO for one in seconds]
        phases, steps = _by_name(PHASES, spent[SECONDS]), float(sum(common[columns.BUCKETS]))
        if self._is_device:  # the host runs ahead, and waits for the device
            phases["device_wait"] = phases.pop("collective_wait", 0.0)
        size, exchanged, micro_steps, working, throttled, clock, compiling = rates
        working = min(working, passed)
        return Counters(
            steps=steps,
            phases=phases,
            device_steps=float(common[columns.MEASURED_STEPS]) if self._is_device else 0.0,
            device_phases=_by_name(PHASES, spent[columns.MEASURED]) if self._is_device else {},
            device_waits=steps if self._is_device else 0.0,
            micro_steps=micro_steps,
            step_buckets=tuple(map(float, common[columns.BUCKETS])),
            aligned=AlignedCounters(
                float(common[columns.COMPARED_STEPS]), common[columns.COMPARED_SECONDS] * NANO,
                spent[columns.FLOOR], spent[columns.SKEW], _by_name((*PHASES, "unknown"), spent[columns.BLAME]),
                _by_name(PHASES, spent[columns.COMPARED]),
            ),
            collectives=CollectiveCounters(
                {"ddp_all_reduce": steps, "all_to_all": steps}, {"ddp_all_reduce": size, "all_to_all": exchanged}
            ),
            gc_seconds=spent[columns.COLLECTED],
            loader_working=working,
            loader_idle=passed - working,
            process=ProcessCounters(passed, 0.01 * passed, CHILDREN * self.plan.computing * working, 0.0, 0.0),
            gpu=GpuCounters(0.95 * (passed - compiling), {"power": throttled}, clock),
        )  # fmt: skip

    def _of_evaluation(self, rank: int, at: float) -> RankReading:
        """Return the reading of a rank that only evaluates: it never ends its start-up, but makes progress."""
        counters = Counters(phases={"startup": at}, gpu=GpuCounters(0.9 * at, {}, at))
        return RankReading(
            rank, at, 0.0, f"0-{self.plan.ranks - 1}", "node-0", f"GPU-{rank}", self.plan.ranks,
            last_progress=at - 0.1, phase="startup", gpu=GpuReading(str(rank), 0.6, 1, 0.0), counters=counters,
        )  # fmt: skip


def _by_name(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if value}


def _spend(durations: Array, extra: Extra, usual: float) -> None:
    """Add what some ranks spend in addition, as a ratio of the usual step."""
    numbers, ranks = np.arange(0, len(durations), extra.every), np.array(extra.ranks)
    if extra.in_turn:
        numbers, ranks = numbers[:, None], ranks[np.arange(len(numbers)) % len(ranks)][:, None]
    else:
        numbers = numbers[:, None]
    for phase, part in extra.phases.items():
        durations[numbers, P[phase], ranks] += part * extra.ratio * usual
