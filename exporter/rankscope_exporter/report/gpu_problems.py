"""The problems of this node's GPUs that alert, and their onsets: by the same facts and limits as the rules about GPUs.

The rules are in deploy/prometheus/rules/rankscope.yml, with the reasons for the limits.
tests/rules/test_gpu_problems.py compares both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from rankscope.record.phases import PLANNED
from rankscope.record.quantities import count, duration, size
from rankscope_exporter.diagnosis import words
from rankscope_exporter.gpu.allocation.idleness import (
    ALLOCATED_NO_PROCESS,
    ALLOCATION,
    FREE,
    KERNEL,
    MEMORY_HELD,
    RANK,
    WORKING,
)
from rankscope_exporter.gpu.nvml.events import HARDWARE_XIDS
from rankscope_exporter.report.gpus import CULPRIT_RUNS, GpuProblem, holder_text
from rankscope_exporter.report.runs import RunReport
from rankscope_exporter.report.values import Values

LOST_FOR = 60.0
XID_FOR = 900.0
HELD_FOR: Mapping[str, float] = {RANK: 90.0, ALLOCATION: 600.0, KERNEL: 43_200.0}
HELD_BY_DEAD_FOR = 600.0
UNUSED_FOR = 600.0
IDLE_FOR, IDLE_WITHOUT_PROGRESS, PROGRESS_WITHIN, PLANNED_FOR = 120.0, 480.0, 75.0, 1800.0
GAP = 60.0
"""Seconds for which a condition may be absent without beginning again, as the rules bridge a minute."""
Fields = Mapping[str, object]
Runs = Callable[[], Sequence[RunReport]]


class Condition(NamedTuple):
    """The condition of an alert, which holds now."""

    kind: str
    gpu: str
    uuid: str
    fields: Fields
    """What the texts say, by name; empty if it is unknown."""
    needed: float = 0.0
    """Seconds for which it has to hold before it alerts."""
    held_since: float | None = None
    """The unix time from which these count, if the facts show it. Else it is that of the first check."""
    began: float | None = None
    """The unix time when the problem began, if it is another one."""
    cause: str = ""
    is_critical: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Return what distinguishes it from other conditions."""
        return self.kind, self.uuid, *(self.fields.get(name) for name in ("xid", "run", "rank"))


class GpuWatch:
    """Checks the GPUs, and knows since when each condition has held. Any thread may call it.

    Called every few seconds, it shows a problem when the rules begin to alert, from the exporter's start on.
    """

    def __init__(self, values: Callable[[], Values], node: str, unix: Callable[[], float] = time.time) -> None:
        """Set the source of the GPUs' metrics, and the node's name."""
        self._values, self._node, self._unix = values, node, unix
        self._held: dict[tuple[object, ...], tuple[float, float]] = {}
        """By key of a condition: the times when it was first and last seen."""
        self._lock = threading.Lock()

    def check(self, runs: Runs) -> Sequence[GpuProblem]:
        """Return the problems that alert, and then those that will if they last; critical ones first."""
        with self._lock:
            values, now = self._values(), self._unix()
            held = {key: seen for key, seen in self._held.items() if 0.0 <= now - seen[1] <= GAP}
            found = []
            for one in conditions(values, cache(runs), now):
                first, _ = held.get(one.key, (now, now))
                held[one.key] = first, now
                found.append(self._problem(one, first, now))
            self._held = held
        return sorted(found, key=lambda one: (one.remaining_seconds > 0.0, one.severity, one.gpu.zfill(3)))

    def _problem(self, one: Condition, first: float, now: float) -> GpuProblem:
        held_since = first if one.held_since is None else one.held_since
        since = held_since if one.began is None else one.began
        age = max(now - since, 0.0)
        fields = {"gpu": one.gpu, "uuid": one.uuid, "node": self._node, "age": duration(age), **one.fields}
        summary, evidence, advice = words.gpu_texts(one.kind, one.cause, fields)
        return GpuProblem(
            kind=one.kind,
            cause=one.cause,
            severity="critical" if one.is_critical else "warning",
            gpu=one.gpu,
            uuid=one.uuid,
            since=since,
            age_seconds=age,
            remaining_seconds=max(held_since + one.needed - now, 0.0),
            sentence=summary,
            evidence=evidence,
            advice=advice,
        )


def conditions(values: Values, runs: Runs, now: float) -> Iterator[Condition]:
    """Yield the conditions of the alerts about GPUs that hold. `now` is unix time."""
    yield from _lost(values)
    yield from _xids(values, now)
    yield from _recurring(values)
    yield from _held_memory(values)
    yield from _unused(values, runs, now)
    yield from _idle(values, runs, now)


def _lost(values: Values) -> Iterator[Condition]:
    if values.by("rankscope_exporter_gpus_released").get(()) == 1.0:
        return
    seen, expected = (values.by(f"rankscope_exporter_gpus_{name}").get(()) for name in ("seen", "expected"))
    answering: Fields = (
        {} if seen is None or expected is None else {"seen": f"{seen:.0f}", "expected": f"{expected:.0f}"}
    )
    lost = [key for key, is_up in values.by("rankscope_gpu_up", "gpu", "uuid").items() if not is_up]
    for gpu, uuid in lost:
        yield Condition("gpu_lost", gpu, uuid, answering, LOST_FOR, is_critical=True)
    if not lost and seen is not None and expected is not None and expected > seen:
        number = int(expected - seen)
        fields = {**answering, "number": number, "lost": f"{count(number, 'GPU')} {'is' if number == 1 else 'are'}"}
        yield Condition("gpu_lost", "", "", fields, LOST_FOR, cause="unlisted", is_critical=True)


def _xids(values: Values, now: float) -> Iterator[Condition]:
    events = values.by("rankscope_gpu_xid_errors_total", "uuid", "xid")
    for (gpu, uuid, xid), at in values.by("rankscope_gpu_xid_last_timestamp_seconds", "gpu", "uuid", "xid").items():
        if now - at < XID_FOR:
            counted = events.get((uuid, xid))
            fields = {"xid": xid, "events": "" if counted is None else f"{counted:.0f}"}
            is_hardware = xid.isdecimal() and int(xid) in HARDWARE_XIDS
            cause = "hardware" if is_hardware else ""
            yield Condition("gpu_xid", gpu, uuid, fields, held_since=at, cause=cause, is_critical=is_hardware)


def _recurring(values: Values) -> Iterator[Condition]:
    for (gpu, uuid, node), runs in values.by("rankscope_gpu_culprit_runs", "gpu", "uuid", "node").items():
        if runs >= CULPRIT_RUNS:
            yield Condition("gpu_recurring", gpu, uuid, {"node": node, "runs": f"{runs:.0f}"})


def _held_memory(values: Values) -> Iterator[Condition]:
    since = values.by("rankscope_gpu_memory_unused_since_timestamp_seconds", "gpu", "uuid", "since")
    states = values.rows("rankscope_gpu_state_info", "uuid")
    used, total, processes = (
        values.by(f"rankscope_gpu_{name}", "uuid") for name in ("memory_used_bytes", "memory_total_bytes", "processes")
    )
    for (gpu, uuid, what), at in since.items():
        needed = HELD_FOR.get(what, HELD_FOR[KERNEL])
        if states.get((uuid,), {}).get("state") == MEMORY_HELD:
            needed = min(needed, HELD_BY_DEAD_FOR)
        memory, of, number = (known.get((uuid,)) for known in (used, total, processes))
        fields = {
            "memory": "much" if memory is None else size(memory),
            "memory_total": "" if memory is None or of is None else size(of),
            "processes": "" if number is None else _processes(int(number)),
        }
        yield Condition("gpu_memory_held", gpu, uuid, fields, needed, held_since=at)


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _unused(values: Values, runs: Runs, now: float) -> Iterator[Condition]:
    idle, holders = _idle_times(values, now), values.rows("rankscope_gpu_allocation_info", "uuid")
    for (gpu, uuid, state), labels in values.rows("rankscope_gpu_state_info", "gpu", "uuid", "state").items():
        if state == ALLOCATED_NO_PROCESS and not labels.get("run"):
            last = _last_rank(runs(), uuid)
            fields = {"holder": holder_text(holders.get((uuid,), {})), "idle": idle.get(uuid, ""), **last}
            yield Condition("gpu_unused", gpu, uuid, fields, UNUSED_FOR, cause="finished" if last else "never_used")


def _last_rank(runs: Sequence[RunReport], uuid: str) -> Fields:
    """Return the last rank that has finished on a GPU, as far as the reports show it."""
    ended = [(rank.ended_seconds, run.run, rank) for run in runs for rank in run.ranks if rank.uuid == uuid]
    known = [(seconds, run, rank) for seconds, run, rank in ended if seconds is not None and not rank.is_alive]
    _, run, rank = min(known, key=lambda one: one[0], default=(0.0, "", None))
    return {"last_rank": str(rank.rank), "last_run": run} if rank and rank.ended == "finished" else {}


def _idle(values: Values, runs: Runs, now: float) -> Iterator[Condition]:
    last_busy, idle = values.by("rankscope_gpu_last_busy_timestamp_seconds", "uuid"), _idle_times(values, now)
    for (gpu, uuid, state), labels in values.rows("rankscope_gpu_state_info", "gpu", "uuid", "state").items():
        if state in (WORKING, FREE) or not labels.get("run"):
            continue
        own = (labels["run"], labels.get("owner", ""))
        run = next((one for one in runs() if (one.run, one.owner) == own), None)
        began = last_busy.get((uuid,))
        if _is_excused(run, None if began is None else now - began):
            continue
        phase = next((one.phase for one in run.ranks if str(one.rank) == labels.get("rank")), "") if run else ""
        fields = {"run": own[0], "rank": labels.get("rank", ""), "phase": phase or "", "idle": idle.get(uuid, "")}
        yield Condition("gpu_idle", gpu, uuid, fields, IDLE_FOR, began=began)


def _is_excused(run: RunReport | None, idle: float | None) -> bool:
    """Return whether the run has a reason to leave a GPU idle for this long, or another alert for it."""
    living = [one for one in run.ranks if one.is_alive] if run else []
    if any(one.phase in PLANNED and (one.phase_seconds or 0.0) < PLANNED_FOR for one in living):
        return True
    if run and any(one.kind == "cpu_fallback" for one in run.findings):
        return True
    makes_progress = any(one.rank == 0 and (one.stalled_seconds or 0.0) < PROGRESS_WITHIN for one in living)
    return idle is not None and idle < IDLE_WITHOUT_PROGRESS and not makes_progress


def _idle_times(values: Values, now: float) -> Mapping[str, str]:
    """Return the time since a kernel last ran on each GPU, in words."""
    last_busy = values.by("rankscope_gpu_last_busy_timestamp_seconds", "uuid")
    return {uuid: duration(max(now - at, 0.0)) for (uuid,), at in last_busy.items()}
