"""Jobs that share a run's name: each is one run, whole and judged, and keeps its name while others start and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from testing.analyzed_job import SLOW, AnalyzedJob
from testing.simulated_job import Job, Plan, even

from rankscope.record.reader import read_rank
from rankscope_exporter.analyzer.alignment import Process
from rankscope_exporter.analyzer.jobs import JOBS_LIMIT, Jobs, Record
from rankscope_exporter.analyzer.nodes import Found, Identity
from rankscope_exporter.diagnosis.readings import Ending, GpuReading, RankReading
from rankscope_exporter.gpu.rank_gpus import GpuCounters, RankGpu

FIRST, SECOND = "10.0.0.1:29500", "10.0.0.3:29500"


def meeting_at(job: AnalyzedJob, *rendezvous: str) -> AnalyzedJob:
    """Set the rendezvous that each node's ranks name. Return the job."""
    for number, rank in enumerate(job.job.ranks):
        assert rank.writer.path is not None
        info = read_rank(rank.writer.path).info
        rank.writer.write_info({**info, "rendezvous": rendezvous[number * len(rendezvous) // len(job.job.ranks)]})
    return job


class Neighbors:
    """Jobs of one name whose nodes one analyzer asks: that of the first job."""

    def __init__(self, first: AnalyzedJob) -> None:
        self.first, self.jobs, self.now = first, [first], first.now
        self.ended: list[AnalyzedJob] = []
        self.shown: list[Mapping[str, frozenset[str]]] = []
        """The nodes of each run, after each pull."""

    def add(self, job: AnalyzedJob) -> None:
        """Add a job on other nodes."""
        self.jobs.append(job)
        self.first.facts += job.facts
        self.first.ahead += job.ahead

    def train(self, seconds: int, slow: Sequence[AnalyzedJob] = ()) -> Neighbors:
        """Train all jobs that have not ended. Return this object."""
        for _ in range(seconds):
            self.now += 1.0
            for job in self.jobs:
                has_ended, plan = job in self.ended, SLOW if job in slow else even
                self._advance(job, plan, has_ended=has_ended)
            if int(self.now) % 3 == 0:
                self._pull()
        return self

    def _advance(self, job: AnalyzedJob, plan: Plan, *, has_ended: bool) -> None:
        while job.now < self.now and not has_ended:
            job.job.run(1, plan)
        for node in job.nodes:
            node.poll(self.now, range(4) if has_ended else ())

    def _pull(self) -> None:
        self.first.pull(self.now)
        found = self.first.diagnosis.look.readings
        self.shown.append({run[0]: frozenset(one.node for one in ranks) for run, ranks in found.items()})

    def places(self) -> set[tuple[str, str, str]]:
        """Return run, kind and node of each open finding."""
        verdicts = self.first.diagnosis.look.judged.verdicts
        return {
            (verdict.run[0], one.kind, one.candidate.place.node) for verdict in verdicts for one in verdict.findings
        }

    def judged(self) -> Mapping[str, list[int]]:
        """Return the ranks of each run that is judged."""
        look = self.first.diagnosis.look
        return {one.run[0]: sorted(rank.rank for rank in look.readings[one.run]) for one in look.judged.verdicts}


ALL = [0, 1, 2, 3]
A, B = frozenset({"node-0", "node-1"}), frozenset({"node-2", "node-3"})
RENDEZVOUS = {
    "addresses": ((FIRST, FIRST), (SECOND, SECOND), f"r (rendezvous {SECOND})"),
    "localhost on the masters": (("localhost:29500", FIRST), ("localhost:29500", SECOND), f"r (rendezvous {SECOND})"),
    "only localhost": (("127.0.0.1:1", "127.0.0.1:1"), ("127.0.0.1:2", "127.0.0.1:2"), "r (node node-2)"),
    "one is of an old hook": ((FIRST, FIRST), ("", ""), "r (node node-2)"),
}


def neighbors(tmp_path: Path, how: str, state_dir: Path | None = None) -> tuple[Neighbors, AnalyzedJob, str]:
    """Return two jobs of which the second began 100 s after the first, the second one, and its run's name."""
    of_first, of_second, name = RENDEZVOUS[how]
    first = meeting_at(AnalyzedJob(tmp_path / "first", state_dir=state_dir), *of_first)
    both = Neighbors(first).train(100)
    second = meeting_at(AnalyzedJob(tmp_path / "second", start=both.now, first_node=2), *of_second)
    both.add(second)
    return both, second, name


@pytest.mark.parametrize(
    "rendezvous", [("localhost:29500", FIRST), ("a:1", "b:2"), ("", FIRST)], ids=["localhost", "names", "old hook"]
)
def test_one_run_whose_nodes_name_its_rendezvous_differently_stays_one(
    tmp_path: Path, rendezvous: tuple[str, str]
) -> None:
    alone = Neighbors(meeting_at(AnalyzedJob(tmp_path), *rendezvous)).train(60)
    assert {*map(tuple, alone.shown[2:])} == {("r",)}
    assert alone.train(20, [alone.first]).places() == {("r", "straggler", "node-1")}


@pytest.mark.parametrize("how", RENDEZVOUS)
def test_two_jobs_of_one_name_are_two_runs_and_each_is_whole_and_judged(tmp_path: Path, how: str) -> None:
    both, second, name = neighbors(tmp_path, how)
    both.train(60)
    assert both.shown[-1] == {"r": A, name: B}
    assert both.judged() == {"r": ALL, name: ALL}
    assert not both.places()
    assert both.train(20, [second]).places() == {(name, "straggler", "node-3")}
    assert both.train(60).train(20, [both.first]).places() == {("r", "straggler", "node-1")}


@pytest.mark.parametrize("how", RENDEZVOUS)
def test_the_first_run_does_not_change_while_the_second_one_starts(tmp_path: Path, how: str) -> None:
    both, _, _ = neighbors(tmp_path, how)
    both.train(60)
    assert {shown["r"] for shown in both.shown[1:]} == {A}


@pytest.mark.parametrize("how", ["addresses", "localhost on the masters"])
def test_no_run_takes_the_name_or_ranks_of_another_one_when_one_restarts_or_ends(tmp_path: Path, how: str) -> None:
    both, second, name = neighbors(tmp_path, how)
    both.train(40)
    for job, at in ((second, "10.0.0.3:29501"), (both.first, "10.0.0.1:29502")):
        directories = [rank.writer.path.parent for rank in job.job.ranks if rank.writer.path]
        job.job = Job.on_nodes([*dict.fromkeys(directories)], 4, both.now, world_size="4", group="0-3")
        for node in job.nodes:
            node.job = job.job
        meeting_at(job, at)
        assert both.train(40).shown[-1] == {"r": A, name: B}
    both.ended = [both.first]
    assert both.train(40).judged()[name] == ALL
    assert all(set(shown) == {"r", name} and shown[name] == B for shown in both.shown[-30:])
    assert both.train(20, [second]).places() >= {(name, "straggler", "node-3")}


def test_a_job_that_starts_after_the_first_has_ended_has_its_name(tmp_path: Path) -> None:
    both, _, name = neighbors(tmp_path, "addresses")
    both.train(40).ended = [both.first]
    both.train(30)
    both.add(meeting_at(AnalyzedJob(tmp_path / "third", start=both.now, first_node=4), "10.0.0.5:29500"))
    both.train(40)
    assert both.shown[-1] == {"r": {"node-4", "node-5"}, name: B}
    assert both.judged() == {"r": ALL, name: ALL}


def test_a_dead_record_of_the_earlier_run_on_an_old_node_is_of_no_run(tmp_path: Path) -> None:
    both, second, _ = neighbors(tmp_path, "addresses")
    both.ended = [both.first]
    both.now += 30.0
    both.train(60)
    assert both.shown[-1] == {"r": B}
    assert both.train(20, [second]).places() == {("r", "straggler", "node-3")}


def test_a_restarted_analyzer_keeps_the_names_although_the_first_job_has_ended(tmp_path: Path, state_dir: Path) -> None:
    both, second, name = neighbors(tmp_path, "addresses", state_dir)
    both.train(60).ended = [both.first]
    both.train(3)
    both.first.analyzer.close()
    both.first.start_analyzer()
    assert both.train(20, [second]).places() >= {(name, "straggler", "node-3")}
    assert both.shown[-1][name] == B


def test_two_namespaces_are_two_runs_also_with_the_same_rendezvous(tmp_path: Path) -> None:
    def gpus(namespace: str) -> Mapping[str, RankGpu]:
        return {"GPU-1": RankGpu(GpuReading("0"), GpuCounters(), namespace=namespace)}

    first = AnalyzedJob(tmp_path / "first", gpus=lambda _at: gpus("a"), uuid="GPU-1", rendezvous="master-0:23456")
    both = Neighbors(first)
    options = {"uuid": "GPU-1", "rendezvous": "master-0:23456", "first_node": 2}
    both.add(AnalyzedJob(tmp_path / "second", gpus=lambda _at: gpus("b"), **options))
    both.train(60)
    assert both.shown[-1] == {"r": A, "r (namespace b)": B}
    assert both.judged() == {"r": ALL, "r (namespace b)": ALL}


def record(
    rank: int, rendezvous: str, node: str, began: float = 0.0, at: float = 1000.0, world_size: int = 4, **identity: str
) -> Record:
    """Return a living rank."""
    local = node if rendezvous.startswith("localhost") else ""
    known = Identity("", "", rendezvous, local, "")._replace(**identity)
    reading = RankReading(rank, at, began, world_size=world_size, last_progress=at)
    found = Found(("r", "0"), Process(node, began, ("r", "0"), rank), reading, known)
    return Record(found, node, node, is_silent=False)


def named(jobs: Jobs, *records: Record, at: float = 1000.0) -> list[tuple[str, int, str]]:
    return sorted((run[0], one.rank, one.node) for run, one in jobs.name(at, records))


def test_jobs_that_start_together_and_are_seen_in_any_order_are_divided_by_port_and_world_size() -> None:
    first = [record(0, "localhost:1", "a", 0.0), record(1, "host-a:1", "b", 0.0)]
    second = [record(0, "localhost:2", "c", 0.1), record(1, "host-c:2", "d", 0.1)]
    expected = [("r", 0, "a"), ("r", 1, "b"), ("r (rendezvous host-c:2)", 0, "c"), ("r (rendezvous host-c:2)", 1, "d")]
    jobs = Jobs()
    assert len(named(jobs, first[0], second[1])) == 2
    assert named(jobs, first[0], second[1], second[0], at=1003.0)
    assert named(jobs, second[1], first[0], second[0], first[1], at=1006.0) == expected


def test_two_jobs_on_the_same_nodes_that_number_them_differently_are_each_whole() -> None:
    shared = [record(0, "h:1", "a"), record(0, "h:2", "a", 1.0), record(1, "h:2", "b", 0.5), record(1, "h:1", "b", 2.0)]
    found = named(Jobs(), *shared)
    assert {run for run, _, _ in found} == {"r", "r (rendezvous h:2)"}
    assert {run: len([one for one in found if one[0] == run]) for run, _, _ in found} == dict.fromkeys(
        {run for run, _, _ in found}, 2
    )
    assert Jobs().name(0.0, shared) is not None


def test_processes_that_replace_others_are_not_a_second_run_while_a_node_still_shows_the_old_ones() -> None:
    old = [record(0, "h:1", "a"), record(1, "h:1", "b")]
    jobs = Jobs()
    for at in range(970, 1000, 3):
        named(jobs, *old, at=float(at))
    renewed = [record(1, "h:2", "a", began=996.0), record(0, "h:2", "b", began=996.0)]
    assert {run for run, _, _ in named(jobs, old[1], renewed[0])} == {"r"}
    assert named(jobs, *renewed, at=1003.0) == [("r", 0, "b"), ("r", 1, "a")]


def test_a_known_namespace_counts_for_a_process_although_another_target_does_not_know_it() -> None:
    known = record(0, "h:1", "a", namespace="n")
    unknown = known._replace(target="sidecar", found=known.found._replace(identity=Identity("", "", "h:1", "", "")))
    assert {run for run, _, _ in named(Jobs(), unknown, known, record(1, "h:1", "b"))} == {"r"}


def test_ended_ranks_stay_with_their_own_job() -> None:
    living = [record(rank, "h:1", "a") for rank in (0, 1)]
    other = record(1, "h:2", "b", began=500.0)
    reading = replace(other.found.reading, ended=Ending("killed", 990.0), last_progress=990.0)
    ended = other._replace(found=other.found._replace(reading=reading))
    assert named(Jobs(), *living, ended) == [("r", 0, "a"), ("r", 1, "a"), ("r (rendezvous h:2)", 1, "b")]


def test_a_node_that_invents_jobs_of_a_name_takes_neither_the_name_nor_the_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    true = [record(rank, "h:1", "a", began=100.0) for rank in range(4)]
    jobs = Jobs()
    for at in range(980, 1000, 3):
        named(jobs, *true, at=float(at))
    forged = [record(rank, f"x:{job}", "evil", began=-1.0 - job) for job in range(100) for rank in range(4)]
    found = named(jobs, *forged, *true)
    assert [one for one in found if one[0] == "r"] == [("r", rank, "a") for rank in range(4)]
    assert len({run for run, _, _ in found}) == JOBS_LIMIT
    assert caplog.text.count("too many jobs have one name") == 1
