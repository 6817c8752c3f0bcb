"""Facts about runs that span nodes: content, sampling, compression and limits."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from testing.analyzed_job import AnalyzedJob
from testing.judged_job import JudgedJob
from testing.simulated_job import even
from tests.exporter.web.test_api import READY

from rankscope.record import layout
from rankscope.record.reader import read_rank
from rankscope_exporter.analyzer.request import unpack
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.node_facts.recorder import KEPT_MOMENTS, MOST_STEPS, NodeFacts
from rankscope_exporter.node_facts.wire import ANALYZER, MOMENTS_LIMIT, Answer, step_of
from rankscope_exporter.web.app import create_app


def answer(facts: NodeFacts, after: float | None = None) -> Answer:
    return Answer.model_validate_json(b"".join(facts.answer(after, 0.0, is_packed=False)))


def test_readings_are_sent_as_they_are(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(12)
    (moment,) = answer(job.facts[0]).moments
    (run,) = job.nodes[0].look.readings
    expected = {one.rank: one for one in job.nodes[0].look.readings[run]}
    assert {sent.reading.rank: sent.reading for sent in moment.ranks} == expected
    assert {tuple(sent.run) for sent in moment.ranks} == {run}


def test_what_distinguishes_jobs_of_one_name_is_sent_as_far_as_it_is_known(tmp_path: Path) -> None:
    (moment,) = answer(AnalyzedJob(tmp_path / "old").train(2).facts[0]).moments
    assert {(one.job, one.namespace, one.rendezvous, one.training) for one in moment.ranks} == {("", "", "", 1)}
    gpus = {"GPU-1": RankGpu(GpuReading("0"), GpuCounters(), namespace="n")}
    known = {"uuid": "GPU-1", "rendezvous": "a:1", "slurm": {"job_id": "7"}}
    (moment,) = answer(AnalyzedJob(tmp_path / "new", gpus=lambda _at: gpus, **known).train(2).facts[0]).moments
    assert {(one.job, one.namespace, one.rendezvous, one.training) for one in moment.ranks} == {("7", "n", "a:1", 1)}


def forge(job: AnalyzedJob, rank: int, what: str) -> None:
    """Write to a rank's record what no rank writes."""
    writer = job.job.ranks[rank].writer
    assert writer.path is not None
    info = read_rank(writer.path).info
    if what == "number":
        writer.write_info({**info, "run": "other", "rank": "4000000000", "world_size": "4100000000"})
    elif what == "start":
        writer.slots[layout.INDEX["phase_since"]] = 1e50
    elif what == "count":
        writer.slots[layout.INDEX["samples"]] = 2.0**150
    else:
        for entry in writer.ring:
            entry[1] += 1e20


@pytest.mark.parametrize("what", ["number", "start", "count", "step"])
def test_one_forged_record_does_not_make_the_answer_invalid(tmp_path: Path, what: str) -> None:
    job = AnalyzedJob(tmp_path).train(5)
    forge(job, 0, what)
    job.poll(job.now + 1.0)
    (moment,) = answer(job.facts[0]).moments
    assert 1 in {one.reading.rank for one in moment.ranks}


def test_a_run_that_is_whole_on_the_node_is_not_sent(run_dir: Path) -> None:
    job, facts = JudgedJob(run_dir), NodeFacts("node-a")
    job.diagnosis.listeners = [facts.record]
    job.train(12)
    assert job.look.judged.verdicts
    assert not answer(facts).moments[0].ranks


def test_each_moment_after_the_cursor_is_sent_once_and_at_most_so_many(tmp_path: Path) -> None:
    facts = AnalyzedJob(tmp_path).train(KEPT_MOMENTS + 10).facts[0]
    received: list[float] = []
    cursor = 0.0
    while moments := answer(facts, cursor).moments:
        assert len(moments) <= MOMENTS_LIMIT
        received += [moment.at for moment in moments]
        cursor = received[-1]
    assert len(received) == len(set(received)) == KEPT_MOMENTS
    assert received == sorted(received)


def test_short_steps_are_sampled_by_their_number_in_the_same_way_on_all_nodes(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path)
    for _ in range(10):
        job.train(1, lambda _step, _rank: {"forward": 0.005, "backward": 0.01})
    numbers: dict[int, set[int]] = defaultdict(set)
    for facts in job.facts:
        for sent in (sent for moment in answer(facts, 0.0).moments for sent in moment.ranks):
            numbers[sent.reading.rank] |= {row[0] for row in sent.steps}
    assert numbers.keys() == {0, 1, 2, 3}
    assert all(steps == numbers[0] for steps in numbers.values())
    assert 0.4 * MOST_STEPS < len(numbers[0]) / 10 <= MOST_STEPS


def test_a_step_is_sent_to_the_microsecond(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(5, even)
    moment = answer(job.facts[0]).moments[0]
    step = step_of(moment.ranks[0].steps[-1], "host")
    assert step.seconds == pytest.approx(sum(step.phases), abs=1e-5)
    assert step.end <= job.now


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    job = AnalyzedJob(tmp_path).train(5)
    return TestClient(create_app(Scrape([]), READY, facts=job.facts[0]))


def test_the_page_is_compressed_if_the_client_accepts_it(client: TestClient) -> None:
    plain = client.get("/api/v1/facts", headers={"Accept-Encoding": "identity"})
    packed = client.get("/api/v1/facts?after=0", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert len(plain.json()["moments"]) == 1
    assert len(packed.json()["moments"]) == 5


def test_the_node_knows_which_analyzer_asks(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(5)
    reporter = job.nodes[0].reporter()
    client = TestClient(create_app(Scrape([]), READY, reporter, job.facts[0]))
    client.get("/api/v1/facts")
    assert reporter.analyzer.address is None
    client.get("/api/v1/facts", headers={ANALYZER: "monitor:10418"})
    assert reporter.analyzer.address == "monitor:10418"


@pytest.mark.parametrize("cursor", ["x", "", "1;2"])
def test_a_cursor_that_is_no_number_is_refused(client: TestClient, cursor: str) -> None:
    assert client.get(f"/api/v1/facts?after={cursor}").status_code == 400


def test_a_compressed_answer_has_the_same_content(tmp_path: Path) -> None:
    facts = AnalyzedJob(tmp_path).train(5).facts[0]
    plain: Any = json.loads(b"".join(facts.answer(0.0, 1.0, is_packed=False)))
    packed = b"".join(facts.answer(0.0, 1.0, is_packed=True))
    assert json.loads(unpack(packed)) == json.loads(gzip.decompress(packed)) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "x" * 300},
        {"group": "0-3\n"},
        {"rank": -1},
        {"rank": 10**12},
        {"phase": "\x1b[31m"},
        {"issued": {str(number): 1.0 for number in range(1000)}},
        {"last_progress": "soon"},
        {"counters": {"phases": {"forward\n": 1.0}}},
        {"counters": {"steps": -1e999}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_forged_reading_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = json.loads(b"".join(AnalyzedJob(tmp_path).train(2).facts[0].answer(None, 0.0, is_packed=False)))
    assert Answer.model_validate(made)
    made["moments"][0]["ranks"][0]["reading"] |= changes
    with pytest.raises(ValidationError):
        Answer.model_validate_json(json.dumps(made))
