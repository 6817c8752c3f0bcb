"""A stretch of a run as promtool's input: the samples of a Prometheus that scrapes its exporters every 15 s.

Exporters restart, scrapes fail, and clocks differ; after a failed scrape every series is stale. Series that are
constant in a healthy run, mostly of GPUs, are those of the rules' tests (testing/promtool.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from testing.promtool import GIB
from validation.month.plan import RANKS_PER_NODE, Plan
from validation.month.record import BUCKETS, CAUSES, SCRAPE, UNKNOWN, Record
from validation.month.steps import PHASES, WAIT, Array, P

BUSY = [P[name] for name in ("optimizer", "forward", "backward", "collective_wait")]
PLANNED = [P[name] for name in ("startup", "checkpoint", "evaluation")]
ABSENT = np.nan
HIGHEST_CLOCK = 1.98e9  # hertz

Line = dict[str, str]


class Stretch:
    """The scrapes from `first` to `last` of a run, with its own name."""

    def __init__(self, plan: Plan, record: Record, first: int, last: int) -> None:
        self.plan, self.record = plan, record
        self.first, self.last = max(first, 0), min(last, len(record.times))
        self.name = f"{plan.name}-{self.first}"
        self._scrapes = slice(self.first, self.last)
        self._begin = record.times[self.first]
        self._times = record.times[self._scrapes] - self._begin

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def begin(self) -> float:
        """The start in seconds of the run."""
        return float(self._begin)

    def has(self, names: set[str]) -> bool:
        """Return whether one of these label values is its run or one of its nodes."""
        return any(name == self.name or name.rpartition("-")[0] == self.name for name in names)

    def lines(self) -> Iterator[Line]:
        answers = self._answers()
        for node in range(self.plan.nodes):
            common = f'job="rankscope",instance="{self.name}-{node}"'
            yield input_series(f"up{{{common}}}", answers[node].astype(float))
            for name, values in self._exporter(float(self.plan.skewed[node])):
                yield input_series(f"{name}{{{common}}}", np.where(answers[node], values, ABSENT))
        for rank in range(self.plan.ranks):
            node = rank // RANKS_PER_NODE
            common = f'job="rankscope",instance="{self.name}-{node}",run="{self.name}",rank="{rank}"'
            for name, values in self._rank(rank, float(self.plan.skewed[node])):
                yield input_series(_with_labels(name, common), np.where(answers[node], values, ABSENT))
            common = (
                f'job="rankscope",instance="{self.name}-{node}",gpu="{rank % RANKS_PER_NODE}",uuid="{self._uuid(rank)}"'
            )
            for name, values in self._gpu(rank, float(self.plan.skewed[node]), node):
                yield input_series(_with_labels(name, common), np.where(answers[node], values, ABSENT))

    def _uuid(self, rank: int) -> str:
        return f"GPU-{self.name}-{rank}"

    def _answers(self) -> Array:
        """Return by node which scrapes have an answer."""
        found = np.ones((self.plan.nodes, len(self)), bool)
        for one in self.plan.events:
            if one.kind in ("missed scrape", "exporter restart", "Prometheus restart"):
                nodes = slice(None) if one.kind == "Prometheus restart" else one.rank
                at = one.at - self._begin
                found[nodes, (self._times >= at) & (self._times < at + one.seconds)] = False
        return found

    def _ones(self) -> Array:
        return np.ones(len(self))

    def _exporter(self, skewed: float) -> Iterator[tuple[str, Array]]:
        yield "rankscope_exporter_build_info", self._ones()
        yield "rankscope_exporter_time_seconds", self._times + skewed
        for name, value in (("gpus_expected", 8.0), ("gpus_seen", 8.0), ("gpus_released", 0.0)):
            yield f"rankscope_exporter_{name}", value * self._ones()

    def _rank(self, rank: int, skewed: float) -> Iterator[tuple[str, Array]]:
        record, part = self.record, self._scrapes
        up = record.up[part]
        started = record.started[part] - self._begin + skewed
        info = f'group="{self.plan.group}",node="{self.name}-{rank // RANKS_PER_NODE}",uuid="{self._uuid(rank)}"'
        yield f"rankscope_rank_info{{{info}}}", self._ones()
        yield "rankscope_rank_up", up.astype(float)
        yield "rankscope_rank_start_timestamp_seconds", started
        yield "rankscope_rank_steps_total", record.steps[part]
        since = record.since[part, rank] - self._begin + skewed
        yield "rankscope_rank_last_progress_timestamp_seconds", np.where(up, since, ABSENT)
        for phase in (*PLANNED, WAIT, P["other"]):
            is_in = up & (record.phase[part, rank] == phase)
            name = f'rankscope_rank_phase_since_timestamp_seconds{{phase="{PHASES[phase]}"}}'
            yield name, np.where(is_in, since, ABSENT)
        yield "rankscope_rank_checkpoint_last_timestamp_seconds", record.checkpoint[part] - self._begin + skewed
        yield "rankscope_rank_checkpoints_total", record.checkpoints[part]
        yield from self._phases(rank)
        yield from self._aligned(rank)
        yield from self._explanations(rank)

    def _phases(self, rank: int) -> Iterator[tuple[str, Array]]:
        """Yield the phases on the host; if the device is measured, the host only issues work and waits."""
        record, part = self.record, self._scrapes
        seconds = record.seconds[part, :, rank]
        if self.plan.clock == "host":
            for phase, name in enumerate(PHASES):
                yield f'rankscope_rank_phase_seconds_total{{phase="{name}"}}', seconds[:, phase]
            return
        for phase in PLANNED:
            yield f'rankscope_rank_phase_seconds_total{{phase="{PHASES[phase]}"}}', seconds[:, phase]
        rest = seconds.sum(axis=1) - seconds[:, PLANNED].sum(axis=1)
        yield 'rankscope_rank_phase_seconds_total{phase="other"}', self.plan.host * rest
        yield 'rankscope_rank_phase_seconds_total{phase="device_wait"}', (1 - self.plan.host) * rest
        yield "rankscope_rank_device_waits_total", record.steps[part]
        yield "rankscope_rank_device_steps_total", record.measured_steps[part]
        for phase, name in enumerate(PHASES):
            if phase not in PLANNED:
                yield f'rankscope_rank_device_seconds_total{{phase="{name}"}}', record.measured[part, phase, rank]
        for name in ("forward", "backward", "optimizer", "other"):
            dry = 0.01 * record.measured[part, P[name], rank]
            yield f'rankscope_rank_device_dry_seconds_total{{phase="{name}"}}', dry

    def _aligned(self, rank: int) -> Iterator[tuple[str, Array]]:
        record, part = self.record, self._scrapes
        yield "rankscope_rank_transfer_floor_seconds_total", record.floor[part, rank]
        yield "rankscope_rank_skew_seconds_total", record.skew[part, rank]
        for phase in (*CAUSES, UNKNOWN):
            name = "unknown" if phase == UNKNOWN else PHASES[phase]
            yield f'rankscope_rank_blame_seconds_total{{phase="{name}"}}', record.blame[part, phase, rank]
        if self.plan.nodes > 1:
            clock = f'clock="{self.plan.clock}"'
            yield f"rankscope_rank_reference_step{{{clock}}}", record.reference[part]
            for phase, name in enumerate(PHASES):
                seconds = record.reference_seconds[part, phase, rank]
                if phase not in PLANNED or seconds.any():
                    yield f'rankscope_rank_reference_step_seconds{{{clock},phase="{name}"}}', seconds

    def _explanations(self, rank: int) -> Iterator[tuple[str, Array]]:
        """Yield the series that explain where time goes."""
        record, part = self.record, self._scrapes
        steps = record.steps[part]
        waited = record.seconds[part, P["data_wait"], rank]
        passed = np.maximum(record.times[part] - record.started[part], 0)
        busy = np.clip(self.plan.loader * passed + waited, 0, passed)
        yield 'rankscope_rank_loader_worker_seconds_total{state="working"}', busy
        yield 'rankscope_rank_loader_worker_seconds_total{state="idle"}', passed - busy
        yield 'rankscope_rank_cpu_seconds_total{who="workers"}', self.plan.computing * busy
        yield "rankscope_rank_workers_run_queue_seconds_total", 0.01 * passed
        yield "rankscope_rank_run_queue_seconds_total", 0.01 * passed
        yield "rankscope_rank_child_processes", self._ones()
        yield "rankscope_rank_gc_seconds_total", record.collected[part, rank]
        for name, value in (("collectives_total", 1.0), ("collective_bytes_total", 1e9)):
            yield f'rankscope_rank_{name}{{op="ddp_all_reduce"}}', value * steps
        issued = steps + (record.phase[part, rank] == WAIT)
        yield f'rankscope_rank_group_collectives_total{{group="{self.plan.group}"}}', issued
        if rank == 0:
            for number, bound in enumerate((*map(str, BUCKETS), "+Inf")):
                yield f'rankscope_rank_step_seconds_bucket{{le="{bound}"}}', record.histogram[part, number]

    def _gpu(self, rank: int, skewed: float, node: int) -> Iterator[tuple[str, Array]]:
        record, part = self.record, self._scrapes
        yield f'rankscope_gpu_info{{node="{self.name}-{node}"}}', self._ones()
        yield "rankscope_gpu_busy_seconds_total", self._since_exporter_start(node, self._busy(rank))
        phase = record.phase[part, rank]
        computes = record.up[part] & ~np.isin(phase, [*PLANNED, P["data_wait"]])
        last = np.maximum.accumulate(np.where(computes, record.times[part], record.since[part, rank]))
        yield "rankscope_gpu_last_busy_timestamp_seconds", last - self._begin + skewed
        yield "rankscope_gpu_memory_used_bytes", np.where(record.up[part], 56 * GIB, GIB)
        yield "rankscope_gpu_memory_total_bytes", 80 * GIB * self._ones()
        yield "rankscope_gpu_processes", record.up[part].astype(float)
        yield "rankscope_gpu_up", self._ones()
        yield "rankscope_gpu_pcie_link_width", 16 * self._ones()
        yield "rankscope_gpu_pcie_link_width_max", 16 * self._ones()
        yield 'rankscope_gpu_clock_hertz{domain="sm"}', HIGHEST_CLOCK * record.clock[part]
        yield 'rankscope_gpu_clock_max_hertz{domain="sm"}', HIGHEST_CLOCK * self._ones()
        throttled = np.cumsum(np.where(record.clock < 1, SCRAPE, 0.0))[part]
        name = 'rankscope_gpu_throttled_seconds_total{reason="sw_power_cap"}'
        yield name, self._since_exporter_start(node, throttled)

    def _busy(self, rank: int) -> Array:
        """Return the seconds in which a kernel ran, including earlier processes of the job."""
        busy = self.record.seconds[: self.last, BUSY, rank].sum(axis=1)
        grown = np.diff(busy, prepend=0.0)
        return np.cumsum(np.where(grown < 0, busy, grown))[self._scrapes]

    def _since_exporter_start(self, node: int, values: Array) -> Array:
        """Restart the exporter's own counters with it; ranks' are read from their records."""
        values = values.copy()
        for one in self.plan.events:
            if one.kind == "exporter restart" and one.rank == node:
                after = self._times >= one.at - self._begin
                if after.any():
                    values[after] -= values[after][0]
        return values


def _with_labels(name: str, common: str) -> str:
    metric, _, labels = name.rstrip("}").partition("{")
    return f"{metric}{{{common}{',' if labels else ''}{labels}}}"


def input_series(series: str, values: Array) -> Line:
    """Return a series in promtool's notation; NaN is an absent sample."""
    return {"series": series, "values": _text(values)}


def _text(values: Array) -> str:
    """Return the values in promtool's notation. An absent sample after another is stale."""
    if not np.isnan(values).any():
        differences = np.unique(np.diff(values)) if len(values) < 3 or values[0] == values[1] else ()
        if len(differences) == 1 and differences[0] == 0:
            return f"{values[0]:.12g}x{len(values) - 1}"
        return " ".join(map(_number, values.tolist()))
    words, was_present = [], False
    for value in values.tolist():
        is_present = value == value
        words.append(_number(value) if is_present else "stale" if was_present else "_")
        was_present = is_present
    return " ".join(words)


def _number(value: float) -> str:
    return f"{value:.12g}"
