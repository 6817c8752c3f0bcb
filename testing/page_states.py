"""The states of a node that its status page shows: metrics of its GPUs, and simulated runs that are diagnosed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric

from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.report.gpu_problems import GpuWatch
from rankscope_exporter.report.rates import INTERVAL
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.report.values import Values
from rankscope_exporter.web.status_page import render_status
from testing.clock import Clock
from testing.families import family
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import Plan, even, lagging

GPUS, NODE, GIB, NOW = 4, "node-a", 2**30, 1_800_000_000.0
WATCHED = 900.0
"""Seconds for which the exporter has seen the GPUs as they are."""
Sample = tuple[Mapping[str, str], float]
Families = dict[str, Sequence[Sample]]


class State(NamedTuple):
    """A node at NOW."""

    families: Families
    """The samples of the GPUs' metrics by name, without `rankscope_`."""
    reporter: Reporter


def render(state: State) -> str:
    """Return the page of a node whose GPUs have been like this for some time."""
    clock = Clock(NOW - WATCHED)
    metrics = as_metrics(state.families)
    watch = GpuWatch(lambda: Values(metrics), NODE, clock)
    while clock() < NOW:
        watch.check(lambda: ())
        clock.advance(30.0)
    state.reporter.check_gpus = watch.check
    return render_status(metrics, state.reporter, NOW, NODE)


def as_metrics(families: Families) -> list[Metric]:
    return [family(name, *samples) for name, samples in families.items()]


def gpu(index: int, **more: str) -> dict[str, str]:
    return {"gpu": str(index), "uuid": f"GPU-{index}", **more}


def working(run: str = "r") -> Families:
    """Return four GPUs that work for the ranks of a run."""
    values = {
        "up": 1.0,
        "memory_used_bytes": 48.0 * GIB,
        "memory_total_bytes": 80.0 * GIB,
        "power_watts": 540.0,
        "temperature_celsius": 61.0,
        "processes": 1.0,
        "busy_seconds_total": 400.0,
        "last_busy_timestamp_seconds": NOW,
    }
    found: Families = {f"gpu_{name}": [(gpu(index), value) for index in range(GPUS)] for name, value in values.items()}
    ranks = [{"run": run, "rank": str(index), "owner": "0"} for index in range(GPUS)]
    found["gpu_info"] = [(gpu(index, node=NODE, name="NVIDIA H100 80GB HBM3"), 1.0) for index in range(GPUS)]
    found["gpu_state_info"] = [(gpu(index, state="working", **rank), 1.0) for index, rank in enumerate(ranks)]
    found["gpu_allocation_info"] = [
        (gpu(index, source="rank", user="", **rank), 1.0) for index, rank in enumerate(ranks)
    ]
    found["exporter_nvml_up"] = [({}, 1.0)]
    found |= {f"exporter_gpus_{name}": [({}, float(GPUS))] for name in ("seen", "expected")}
    return found


def changed(index: int, **values: float | Mapping[str, str] | None) -> Families:
    """Return these GPUs with other values of one of them, by the name of the metric: labels, a number, or none."""
    found = working()
    for name, value in values.items():
        kept = [one for one in found.get(f"gpu_{name}", ()) if one[0]["gpu"] != str(index)]
        new = [] if value is None else [(gpu(index), value) if isinstance(value, float) else (gpu(index, **value), 1.0)]
        found[f"gpu_{name}"] = [*kept, *new]
    return found


def without_rank(index: int, state: str, since: float, **more: float) -> Families:
    """Return these GPUs with one that no rank has, in this state, on which no kernel has run since a time."""
    no_rank = {"run": "", "rank": "", "owner": ""}
    info = {"state_info": {"state": state, **no_rank}, "allocation_info": {"source": "slurm", "user": "eve", **no_rank}}
    return changed(index, **info, last_busy_timestamp_seconds=since, **more)


def lost_with_xid(xid: int) -> Families:
    """Return these GPUs with one that reported an XID a minute ago, and does not answer since then if it is XID 79."""
    if xid != 79:
        found = working()
    else:
        found = changed(1, **{name.removeprefix("gpu_"): None for name in working() if name.startswith("gpu_")})
        found["gpu_up"] = [*found["gpu_up"], (gpu(1), 0.0)]
        found["exporter_gpus_seen"] = [({}, GPUS - 1.0)]
    found["gpu_xid_last_timestamp_seconds"] = [(gpu(1, xid=str(xid)), NOW - 60.0)]
    found["gpu_xid_errors_total"] = [(gpu(1, xid=str(xid)), 2.0)]
    return found


def culprit() -> Families:
    """Return these GPUs with one that was the culprit in four runs of the last week, and one that was in two."""
    found = working()
    found["gpu_culprit_runs"] = [(gpu(1, node=NODE), 4.0), (gpu(3, node=NODE), 2.0)]
    return found


def held() -> Families:
    """Return these GPUs with one whose memory a process holds for 20 minutes after its rank has ended."""
    found = without_rank(2, "process_no_work", NOW - 1200.0, memory_used_bytes=20.0 * GIB)
    found["gpu_memory_unused_since_timestamp_seconds"] = [(gpu(2, since="rank"), NOW - 1200.0)]
    return found


def unused() -> Families:
    """Return these GPUs with one that a scheduler has allocated and no process uses."""
    return without_rank(3, "allocated_no_process", NOW - 1500.0, processes=0.0, memory_used_bytes=0.0)


def idle() -> Families:
    """Return these GPUs with one that its rank has not used for 20 minutes."""
    rank = {"run": "r", "rank": "1", "owner": "0"}
    return changed(1, state_info={"state": "process_no_work", **rank}, last_busy_timestamp_seconds=NOW - 1200.0)


def busy(at: float) -> Mapping[str, RankGpu]:
    """Return the readings of the GPUs that the diagnosis has."""
    return {
        f"GPU-{index}": RankGpu(GpuReading(str(index), processes=1), GpuCounters(0.8 * at, {}, None))
        for index in range(GPUS)
    }


def job(directory: Path, run: str = "r") -> JudgedJob:
    return JudgedJob(directory, gpus=busy, run=run)


def reporter(job: JudgedJob, seconds: int = 30, plan: Plan = even) -> Reporter:
    """Return the reporter of a job that trains so long by this plan, with the rates of that time."""
    found = job.reporter()
    for _ in range(0, seconds, int(INTERVAL)):
        job.train(int(INTERVAL), plan)
        found.rates.record(job.look)
    return found


def healthy(directory: Path) -> Reporter:
    return reporter(job(directory), 60)


def straggler(directory: Path) -> Reporter:
    return reporter(job(directory).trained(10), 40, lagging("optimizer"))


def hang(directory: Path) -> Reporter:
    found = job(directory).trained(60)
    found.wait(310, HUNG)
    return found.reporter()


def crash(directory: Path) -> Reporter:
    found = job(directory).trained(30)
    for second in range(1, 9):
        found.poll(found.now + second, ended=[1])
    return found.reporter()


def two_runs(directory: Path) -> Reporter:
    """Return the reporter of two runs, of which the second has a straggler."""
    first, second = (job(directory, run=run) for run in ("first", "second"))
    for second_of_both in range(40):
        for one, plan in ((first, even), (second, lagging("optimizer"))):
            while one.now < 1001.0 + second_of_both:
                one.job.run(1, plan)
        second.poll(max(first.now, second.now))
    return second.reporter()


def no_run(_: Path) -> Reporter:
    return Reporter(lambda: Scan([], Counter()), lambda: None)


STATES: Mapping[str, tuple[Callable[[], Families], Callable[[Path], Reporter]]] = {
    "healthy": (working, healthy),
    "straggler": (working, straggler),
    "hang": (working, hang),
    "crash": (working, crash),
    "xid 79": (lambda: lost_with_xid(79), healthy),
    "xid 48": (lambda: lost_with_xid(48), healthy),
    "culprit": (culprit, healthy),
    "held memory": (held, healthy),
    "unused": (unused, healthy),
    "idle": (idle, healthy),
    "two runs": (working, two_runs),
    "no run": (working, no_run),
}


def state(name: str, directory: Path) -> State:
    """Return the state of this name, with the ranks' records in a directory."""
    families, runs = STATES[name]
    return State(families(), runs(directory))
