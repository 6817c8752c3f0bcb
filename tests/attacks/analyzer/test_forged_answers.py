"""Attack: an exporter that invents ranks, nodes, GPUs, times and texts, to change the findings about other nodes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from testing.analyzed_job import SLOW, AnalyzedJob
from testing.simulated_job import Plan, even
from tests.attacks.analyzer.answers import EVIL, answer, document, rank

from rankscope_exporter.analyzer import merge
from rankscope_exporter.analyzer.metrics import AnalyzerCollector
from rankscope_exporter.analyzer.nodes import RUNS_LIMIT
from rankscope_exporter.analyzer.service import HOLD_SECONDS
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.node_facts.wire import NUMBER_LIMIT, RANKS_LIMIT, Answer

RUN = ("r", "0")
Forgery = Callable[[float], Sequence[Mapping[str, Any]]]


class Attacked:
    """A job on two nodes, and an exporter that answers with what an attacker wants at each pull."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.job = AnalyzedJob(directory, **options)
        self._pull = self.job.pull
        self.job.pull = self.pull  # type: ignore[method-assign]  # the attacker answers first
        self.forged: Callable[[float], Answer] = lambda at: answer(at)
        self.ratios: list[float] = []

    def pull(self, at: float) -> None:
        self.job.analyzer.take(EVIL, self.forged(at), at, at)
        self._pull(at)
        collector = AnalyzerCollector(self.job.analyzer, lambda: dict.fromkeys("abc", ""))
        collector.show(self.job.diagnosis)
        self.ratios += [sample.value for family in collector.collect() for sample in family.samples]

    def invent(self, ranks: Forgery, **options: Any) -> Attacked:
        """Answer with these ranks from now on. Return this object."""
        self.forged = lambda at: answer(at, ranks(at), **options)
        return self

    def train(self, seconds: int, plan: Plan = even) -> Attacked:
        self.job.train(seconds, plan)
        return self

    def findings(self, run: Run = RUN) -> list[Finding]:
        verdicts = self.job.diagnosis.look.judged.verdicts
        return [finding for verdict in verdicts if verdict.run == run for finding in verdict.findings]


@pytest.fixture
def attacked(tmp_path: Path) -> Attacked:
    return Attacked(tmp_path)


TEXTS = ("a\nb", "\x1b[2J", "\u202e", "x" * 300)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("where", ["run", "node", "boot", "job", "namespace", "rendezvous", "gpu", "stage", "uuid"])
def test_no_text_is_accepted_that_cannot_be_a_label(where: str, text: str) -> None:
    one: dict[str, Any] = rank(0, 1.0)
    more: dict[str, Any] = {}
    if where == "run":
        one["run"][0] = text
    elif where in ("job", "namespace", "rendezvous"):
        one[where] = text
    elif where == "gpu":
        one["reading"]["gpu"] = {"index": text}
    elif where == "stage":
        one["reading"]["coordinates"] = {text: 1}
    elif where == "uuid":
        more["moments"] = [{"at": 1.0, "gpus": {text: {"reading": {"index": "0"}}}}]
    else:
        more[where] = text
    assert answer(1.0, [rank(0, 1.0)])
    with pytest.raises(ValidationError):
        answer(1.0, [one], **more)


@pytest.mark.parametrize("owner", ["../../etc/cron.d/x", "0/../1", "-1", "1\n", "root", "9" * 21, " "])
def test_no_owner_is_accepted_that_could_be_another_path_in_the_state_directory(owner: str) -> None:
    assert answer(1.0, [rank(0, 1.0, owner="1000")], now=1.0)
    with pytest.raises(ValidationError):
        answer(1.0, [rank(0, 1.0, owner=owner)])


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "1e60", "-1e60", "9" * 400)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("where", ["now", "at", "began", "last_progress", "ended", "steps", "samples", "group"])
def test_no_number_is_accepted_that_no_clock_or_counter_shows(where: str, number: str) -> None:
    one, mark = rank(0, 1.0), 123456.5
    forged: dict[str, Any] = {"ended": {"reason": "killed", "at": mark}, "group": None, "now": None}.get(where, mark)
    if where in ("steps", "samples"):
        one["reading"]["counters"] = {where: mark}
    elif where == "group":
        one["reading"]["issued"] = {"0-3": mark}
    elif where != "now":
        one["reading"][where] = forged
    text = json.dumps(document(mark if where == "now" else 1.0, [one]))
    assert Answer.model_validate_json(text)
    with pytest.raises(ValidationError):
        Answer.model_validate_json(text.replace(str(mark), number))


@pytest.mark.parametrize(
    "changes",
    [{"rank": NUMBER_LIMIT}, {"world_size": NUMBER_LIMIT}, {"parallelism": ["tp"] * 1000}, {"rank": 0.5}],
)
def test_no_rank_is_accepted_with_an_impossible_number_or_too_many_names(changes: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        answer(1.0, [rank(number=0, at=1.0) | {"reading": {**rank(0, 1.0)["reading"], **changes}}])


def test_more_ranks_than_a_node_has_are_not_accepted() -> None:
    assert answer(1.0, [rank(number, 1.0) for number in range(RANKS_LIMIT)])
    with pytest.raises(ValidationError):
        answer(1.0, [rank(number, 1.0) for number in range(RANKS_LIMIT + 1)])


def test_a_living_rank_of_another_node_is_not_replaced(attacked: Attacked) -> None:
    attacked.train(60)
    late = {"began": -1e6, "counters": {"steps": 1e6, "phases": {"forward": 1e6}}, "phase": "data_wait"}
    attacked.invent(lambda at: [rank(number, at, **late) for number in range(4)]).train(30)
    assert not attacked.findings()
    (finding,) = attacked.train(20, SLOW).findings()
    assert (finding.candidate.place.rank, finding.candidate.place.node) == (3, "node-1")


def test_a_copied_process_of_another_node_adds_nothing(attacked: Attacked) -> None:
    attacked.train(60)
    copied = {"boot": "boot of node-1", "node": "node-1"}
    began = next(one.began for one in attacked.job.nodes[1].look.readings[RUN] if one.rank == 3)
    one = {"began": began, "phase": "data_wait", "last_progress": 0.0}
    attacked.invent(lambda at: [{**rank(3, at, **one), "clock": "host"}], **copied).train(60)
    assert not attacked.findings()
    (found,) = attacked.job.diagnosis.look.readings.values()
    assert {reading.rank: reading.last_progress > attacked.job.now - 10 for reading in found}[3]


@pytest.mark.parametrize(("node", "shown"), [("node-0", "node-0 (evil:10417)"), ("evil", "evil")])
def test_a_finding_about_an_invented_rank_has_the_name_of_the_node_that_invents_it(
    attacked: Attacked, node: str, shown: str
) -> None:
    ended = {"ended": {"reason": "killed", "at": attacked.train(30).job.now}}
    sizes = {"world_size": 2, "group": "0-1", "node": "node-1"}
    attacked.invent(lambda at: [rank(0, at, "b", **sizes), rank(1, at, "b", **sizes, **ended)], node=node).train(30)
    (finding,) = attacked.findings(("b", "0"))
    assert (finding.kind, finding.candidate.place.node) == ("crash", shown)


def test_a_name_of_a_node_is_free_after_it_was_silent_for_long(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "FORGET_RUN_AFTER", 120.0)
    attacked.train(9)
    invent = attacked.invent(lambda at: [rank(9, at, "other", world_size=10)], node="node-0")

    def nodes() -> set[str]:
        readings = attacked.job.diagnosis.look.readings
        return {one.node for one in readings[("other", "0")] if one.node}

    invent.train(9)
    assert nodes() == {"node-0 (evil:10417)"}
    attacked.job.silent = {0}
    attacked.job.wait(60)
    assert nodes() == {"node-0 (evil:10417)"}
    attacked.job.wait(180)
    assert nodes() == {"node-0"}


def test_two_exporters_on_one_node_have_its_name(attacked: Attacked) -> None:
    attacked.train(9)
    attacked.invent(lambda at: [rank(9, at, "b", world_size=10)], node="node-0", boot="boot of node-0").train(9)
    readings = attacked.job.diagnosis.look.readings
    assert {one.node for one in readings[("b", "0")] if one.node} == {"node-0"}


@pytest.mark.parametrize(("boot", "is_joined"), [("boot of node-1", True), ("boot of evil", False)])
def test_the_gpu_of_a_rank_is_that_of_its_own_node(tmp_path: Path, boot: str, *, is_joined: bool) -> None:
    attacked = Attacked(tmp_path, uuid="GPU-1")
    gpu = {"GPU-1": {"reading": {"index": "7"}}}
    attacked.forged = lambda at: answer(at, boot=boot, moments=[{"at": at, "gpus": gpu}])
    attacked.train(20)
    found = {one.gpu.index: one.node for one in attacked.job.diagnosis.look.readings[RUN] if one.gpu}
    assert found == ({"7": "node-1"} if is_joined else {})
    assert attacked.job.diagnosis.look.judged.not_judged == ({} if is_joined else {RUN: "gpus_unknown"})


@pytest.mark.parametrize("ahead", [-1e9, -3600.0, 3600.0, 1e9])
def test_a_node_in_the_future_or_past_delays_and_changes_nothing(attacked: Attacked, ahead: float) -> None:
    attacked.train(60).forged = lambda at: answer(at + ahead, [rank(9, at + ahead, "other", world_size=10)])
    attacked.train(6)
    attacked.forged = lambda at: answer(at, [rank(9, at, "other", world_size=10)])
    (finding,) = attacked.train(20, SLOW).findings()
    assert finding.candidate.place.rank == 3
    assert attacked.job.diagnosis.look.at > attacked.job.now - 10


def test_a_clock_that_jumps_at_each_answer_delays_others_by_at_most_the_wait(attacked: Attacked) -> None:
    attacked.train(60)
    clock = random.Random(1)
    attacked.forged = lambda at: answer(clock.uniform(-1e9, 1e9), [rank(9, at, "other", world_size=10)])
    (finding,) = attacked.train(30, SLOW).findings()
    assert finding.candidate.place.rank == 3
    assert attacked.job.diagnosis.look.at > attacked.job.now - 10


def test_moments_later_than_the_answer_are_left_out(attacked: Attacked) -> None:
    attacked.train(9).forged = lambda at: answer(
        at, moments=[{"at": at - 1, "ranks": [rank(9, at)]}, {"at": at + 1e6, "ranks": [rank(8, at)]}]
    )
    attacked.train(9)
    node = attacked.job.analyzer._merge.nodes[EVIL]
    assert node.cursor == pytest.approx(attacked.job.now, abs=5.0)


def test_thousands_of_invented_runs_leave_nothing_and_change_nothing(attacked: Attacked) -> None:
    attacked.train(60)
    ends: list[int] = []

    def runs(at: float) -> list[dict[str, Any]]:
        ends.append(len(ends) + 1)
        names = (f"{len(ends)}.{number}" for number in range(RANKS_LIMIT // 2))
        sizes = {"world_size": 2, "group": "0-1"}
        return [rank(one, at, name, str(len(ends)), **sizes) for name in names for one in (0, 1)]

    (finding,) = attacked.invent(runs).train(60, SLOW).findings()
    assert (len(ends), finding.candidate.place.rank) == (20, 3)
    attacked.invent(lambda _at: ()).train(int(HOLD_SECONDS) + 20, SLOW)
    analyzer = attacked.job.analyzer
    assert set(analyzer.look.readings if analyzer.look else ()) == {RUN}
    assert [len(one) for one in (analyzer._merge._shown, analyzer._merge._first_seen)] == [4, 1]
    assert {account.run for account, _ in attacked.job.diagnosis.spent} <= {RUN[0]}
    assert len(analyzer._judges.judges) <= 20 * RUNS_LIMIT + 1


def test_a_node_has_so_many_runs_and_those_of_an_owner_with_few_come_first(attacked: Attacked) -> None:
    names = [f"many {number}" for number in range(100)]
    others = [("few", "2"), ("one", "3")]
    attacked.invent(
        lambda at: [rank(0, at, name, "1") for name in names] + [rank(0, at, name, owner) for name, owner in others]
    ).train(9)
    found = [*attacked.job.diagnosis.look.readings]
    assert len(found) == RUNS_LIMIT + 1
    assert {RUN, *others} < {*found}


def test_boots_that_change_at_each_answer_leave_nothing(attacked: Attacked) -> None:
    attacked.forged = lambda at: answer(at, [rank(9, at, "x", world_size=10)], node=f"n{at}", boot=f"boot {at}")
    attacked.train(60)
    merge = attacked.job.analyzer._merge
    assert len(merge.anchors) == len(merge._named) == 3
    assert len(merge._sources) <= len(merge._shown) + 1 <= 6


def test_invented_ranks_that_live_twice_are_logged_at_most_once_a_minute(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    attacked.train(30).invent(
        lambda at: [rank(0, at, f"{at} {run}", began=began) for run in range(100) for began in (0.0, 1.0)]
    )
    attacked.train(90)
    assert 1 <= caplog.text.count("several processes are the same rank") <= 2


def _some_number(source: random.Random) -> float:
    return source.choice([0.0, 1.0, -1.0, 1e-300, 2.0**128, -(2.0**128), 1e9, source.uniform(-1e3, 1e3)])


def _some_reading(source: random.Random, at: float) -> dict[str, Any]:
    names = ["forward", "backward", "data_wait", "collective_wait", "other", "0-3", "all_reduce", "x"]
    numbers = lambda: {name: _some_number(source) for name in source.sample(names, 4)}  # noqa: E731 - a short name
    time = lambda: source.choice([at, 0.0, -1e10, 1e10, at - source.uniform(0, 100)])  # noqa: E731
    maps = ("phases", "device_phases", "device_dry")
    counters: dict[str, Any] = {name: numbers() for name in maps} | {"aligned": {"blame": numbers(), "steps": 1e9}}
    counters |= {name: _some_number(source) for name in ("steps", "device_steps", "micro_steps", "gc_seconds")}
    counters["collectives"] = {name: numbers() for name in ("calls", "bytes", "seconds", "group_waits")}
    counters["step_buckets"] = [_some_number(source) for _ in range(source.randrange(20))]
    reading = {"began": time(), "last_progress": time(), "phase_since": time(), "issued": numbers()}
    reading |= {"counters": counters, "phase": source.choice(names), "collective": source.choice(names)}
    reading |= {"group": source.choice(["0-1", "", "x", "0-99999999"]), "stage": source.choice([None, -5, 2**40])}
    reading |= {"parallelism": source.sample(["tp", "pp", "x"], 2), "coordinates": {"cp": -(2**60), "x": 1}}
    if source.random() < 0.2:
        reading["ended"] = {"reason": source.choice(["killed", "exception", "x"]), "at": time()}
    return reading


@pytest.mark.parametrize("seed", range(6))
def test_random_numbers_of_one_node_end_in_no_error_and_in_finite_metrics(tmp_path: Path, seed: int) -> None:
    attacked, source = Attacked(tmp_path, world_size="6", ranks=4), random.Random(seed)

    def ranks(at: float) -> list[dict[str, Any]]:
        found = []
        for run, size in (("a", 2), ("b", 2), ("r", 6)):
            for number in range(size):
                reading = {**_some_reading(source, at), "world_size": source.choice([size, size, size, 0, 3])}
                step = [source.choice([0, 1, 2**53]) for _ in range(15)]
                steps = [[at_step, *step[1:]] for at_step in range(int(at), int(at) + 3)]
                found.append({**rank(number, at, run, **reading), "clock": "host", "steps": steps})
        return found

    attacked.invent(ranks).train(90, SLOW)
    assert attacked.ratios
    assert all(map(math.isfinite, attacked.ratios))
