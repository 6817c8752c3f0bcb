"""The judge's findings in the history of the GPUs: of an exporter's node, and of the runs that an analyzer judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from testing.analyzed_job import AnalyzedJob
from testing.judged_job import JudgedJob
from testing.simulated_job import Job, Plan, SimulatedRank, even, lagging

from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ledger import parts
from rankscope_exporter.ranks import look
from rankscope_exporter.ranks.collectors.findings import FindingTexts, families
from rankscope_exporter.ranks.judged_runs import Diagnosis

START, RANKS = 1000.0, 4
SCRIPTS: Mapping[str, Plan] = {
    "loading": lambda step, rank: {**even(step, rank), "data_wait": 0.04 if rank == 2 else 0.001},
    "more work": lagging("backward"),
    "outside the model": lagging("other"),
    "rank 0 works": lagging("backward", laggard=0),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock of all jobs, whose `now` a test sets."""
    clock = SimpleNamespace(now=START)
    monkeypatch.setattr(look, "time", SimpleNamespace(time=lambda: clock.now + 1e9))
    return clock


def gpus(at: float, hot: str = "") -> Mapping[str, RankGpu]:
    """Return a GPU for each rank. One of them has been throttled since the start."""
    seconds = {f"GPU-{rank}": at - START if f"GPU-{rank}" == hot else 0.0 for rank in range(RANKS)}
    return {
        uuid: RankGpu(GpuReading(uuid[-1], processes=1), GpuCounters(at, {"hw_thermal_slowdown": throttled}))
        for uuid, throttled in seconds.items()
    }


def job_on(directories: Sequence[Path], ranks: int = RANKS, start: float = START, **labels: object) -> Job:
    """Return a job on these nodes, each rank with its own GPU."""
    job = Job(directories[0], 0)
    for rank in range(ranks):
        on = directories[rank * len(directories) // ranks]
        own = {"node": on.name, "uuid": f"GPU-{rank}", **labels}
        job.ranks.append(SimulatedRank(on, rank, start, **own))
    return job


def node_job(directory: Path, state_dir: Path, number: int, hot: str = "") -> JudgedJob:
    """Return a job on one node, whose exporter was restarted before it."""
    run_dir = directory / f"run-{number}"
    run_dir.mkdir()
    labels = {"run": f"r{number}", "world_size": str(RANKS), "group": f"0-{RANKS - 1}", "node": "node-a"}
    job = job_on([run_dir], **labels)
    return JudgedJob(run_dir, gpus=lambda at: gpus(at, hot), state_dir=state_dir, job=job)


def train(job: JudgedJob, clock: SimpleNamespace, plan: Plan, seconds: int = 40) -> JudgedJob:
    for _ in range(seconds):
        job.train(1, plan)
        clock.now = job.now
    job.diagnosis.close()
    return job


def culprits(job: JudgedJob) -> dict[str, float]:
    return {gpu: runs for (gpu, _, _), runs in job.diagnosis._node_history.culprits.items() if runs}


def test_a_throttled_gpu_is_the_culprit_of_each_of_its_runs(
    tmp_path: Path, state_dir: Path, clock: SimpleNamespace
) -> None:
    for number in (1, 2, 3):
        job = train(node_job(tmp_path, state_dir, number, hot="GPU-2"), clock, lagging("backward"))
        assert culprits(job) == {"2": number}
    (part,) = (part for part in parts.read(state_dir) if part.incidents)
    assert {(one.run, one.kind, one.cause, one.rank, one.gpu) for one in part.incidents} == {
        (f"r{number}", "straggler", "throttled", "2", "2") for number in (1, 2, 3)
    }
    lost = part.incidents[0].gpu_seconds
    assert lost == pytest.approx(3 * 0.26 * 40.0, rel=0.4), "the time of the three other ranks"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_with_the_same_fault_in_each_run_makes_no_gpu_the_culprit(
    tmp_path: Path, state_dir: Path, clock: SimpleNamespace, script: str
) -> None:
    for number in (1, 2, 3):
        job = train(node_job(tmp_path, state_dir, number), clock, SCRIPTS[script])
        assert [one.kind for one in job.report().findings] == ["straggler"]
        assert culprits(job) == {}
    assert sum(len(part.incidents) for part in parts.read(state_dir)) == 3


def test_a_run_that_is_healthy_leaves_no_history(tmp_path: Path, state_dir: Path, clock: SimpleNamespace) -> None:
    train(node_job(tmp_path, state_dir, 1), clock, lambda _step, _rank: {"forward": 0.01, "backward": 0.03})
    assert not (state_dir / parts.FILE).exists()


def shown(diagnosis: Diagnosis) -> dict[str, float]:
    """Return the number of runs by GPU, as on /metrics."""
    (family,) = (one for one in families(diagnosis, FindingTexts()) if one.name == "rankscope_gpu_culprit_runs")
    return {sample.labels["uuid"]: sample.value for sample in family.samples}


def test_the_analyzer_counts_the_runs_that_span_nodes(
    tmp_path: Path, state_dir: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "on_nodes", job_on)
    for number in (1, 2, 3):
        directory = tmp_path / str(number)
        job = AnalyzedJob(directory, state_dir=state_dir, gpus=lambda at: gpus(at, "GPU-2"), run=f"r{number}")
        results: list[Diagnosis] = []
        update = job.analyzer.update
        monkeypatch.setattr(
            job.analyzer, "update", lambda now=None, update=update, results=results: results.append(update(now))
        )
        for _ in range(90):
            job.train(1, lagging("backward"))
            clock.now = job.now
        job.analyzer.close()
        assert shown(next(one for one in reversed(results) if one)) == {"GPU-2": number}
    (part,) = (part for part in parts.read(state_dir) if part.incidents)
    assert (part.node, part.uuid, {one.evidence for one in part.incidents}) == ("node-1", "GPU-2", {"throttled"})
    assert len(part.incidents) == 3
