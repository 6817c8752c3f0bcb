"""The runs that an exporter judges: it has to show all of their ranks and read all of their GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from testing.readings import EARLY, RUN, Training, counting, spend

from rankscope_exporter.diagnosis.judge import RunJudge, Verdict
from rankscope_exporter.diagnosis.judged import RANKS_LIMIT, REMEMBERED_LIMIT, RUNS_LIMIT, Judged, Judges
from rankscope_exporter.diagnosis.readings import Ending, RankReading, Run

GPUS = {f"GPU-{number}" for number in range(8)}


def readings(count: int = 2, **changes: Any) -> list[RankReading]:
    """Return all ranks of a run after a minute."""
    *_, (_, found) = Training(count).train(60)
    return [replace(reading, **changes) for reading in found.values()]


def judged(ranks: Iterable[RankReading], run: Run = RUN) -> Judged:
    return Judges().update(60.0, {run: ranks}, GPUS)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_run_is_judged_if_all_its_ranks_and_gpus_are_here(count) -> None:
    found = judged(readings(count))
    assert [verdict.run for verdict in found.verdicts] == [RUN]
    assert not found.not_judged


def test_a_run_without_gpus_is_judged() -> None:
    assert judged(readings(uuid="", gpu=None)).verdicts


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (readings(world_size=3), "ranks_elsewhere"),
        (readings(4)[1:], "ranks_elsewhere"),
        (readings(world_size=9_999_999_999), "ranks_elsewhere"),
        (readings(world_size=0), "world_size_unknown"),
        ([*readings(4)[:2], *readings(4, world_size=8)[2:]], "world_sizes_differ"),
        (readings(uuid="GPU-of-another-machine"), "gpus_unknown"),
    ],
    ids=["another node", "no rank 0", "a forged world size", "no world size", "two world sizes", "an unknown GPU"],
)
def test_a_run_that_is_not_fully_known_is_not_judged_and_has_a_reason(ranks, reason) -> None:
    found = judged(ranks)
    assert not found.verdicts
    assert found.not_judged == {RUN: reason}


def test_a_run_that_grows_to_another_node_is_no_longer_judged() -> None:
    judges = Judges()
    assert judges.update(60.0, {RUN: readings()}, GPUS).verdicts
    assert judges.update(61.0, {RUN: readings(world_size=16)}, GPUS).not_judged == {RUN: "ranks_elsewhere"}


def test_an_ended_rank_counts_as_shown_even_if_its_gpu_is_not_read() -> None:
    first, second = readings()
    gone = replace(second, ended=Ending("killed", 50.0), uuid="GPU-of-another-machine", world_size=7)
    assert judged([first, gone]).verdicts


def test_runs_with_the_same_name_of_two_owners_are_two_runs() -> None:
    mine, theirs = ("llm", "1000"), ("llm", "1001")
    judges = Judges()
    for second in range(3):
        found = judges.update(60.0 + second, {mine: readings(4), theirs: readings(2, world_size=4)}, GPUS)
    assert [verdict.run for verdict in found.verdicts] == [mine]
    assert found.not_judged == {theirs: "ranks_elsewhere"}


def test_the_oldest_runs_of_an_owner_are_judged_and_other_owners_are_not_affected() -> None:
    many: dict[Run, list[RankReading]] = {(f"run-{n}", "1000"): begun(1, float(n)) for n in range(RUNS_LIMIT + 2)}
    others = ("other", "1001")
    found = Judges().update(60.0, {**many, others: begun(1, 50.0)}, GPUS)
    assert {verdict.run for verdict in found.verdicts} == {*list(many)[:RUNS_LIMIT], others}
    assert set(found.not_judged.values()) == {"too_many_runs"}


def test_the_ranks_of_an_owners_runs_have_a_common_limit() -> None:
    sizes = {"first": 8, "second": RANKS_LIMIT, "third": 8}
    runs = {(name, "1000"): begun(size, at) for at, (name, size) in enumerate(sizes.items(), start=1)}
    gpus = {f"GPU-{number}" for number in range(RANKS_LIMIT)}
    assert Judges().update(60.0, runs, gpus).not_judged == {("second", "1000"): "too_many_runs"}


def begun(ranks: int, at: float) -> list[RankReading]:
    return [replace(reading, began=at) for reading in readings(ranks)]


def test_a_rank_that_is_missing_in_one_poll_does_not_end_a_finding() -> None:
    judges, training = Judges(), Training(4)
    for at, ranks in training.train(60, spend("backward", 0.1, 1)):
        seen = [reading for reading in ranks.values() if reading.rank or at != 55.0]
        found = judges.update(at, {RUN: seen}, GPUS)
        assert bool(found.not_judged) == (at == 55.0)
    assert [finding.opened < 55.0 for finding in found.verdicts[0].findings] == [True]


def test_a_run_is_forgotten_some_time_after_it_was_last_seen() -> None:
    judges = Judges()
    judges.update(60.0, {RUN: readings()}, GPUS)
    judges.update(600.0, {}, GPUS)
    assert RUN in judges.judges
    judges.update(1600.0, {}, GPUS)
    assert not judges.judges


def test_the_history_of_a_run_is_restored_when_the_run_is_seen_again() -> None:
    judges = Judges(EARLY)
    for at, ranks in Training().train(120):
        judges.update(at, {RUN: ranks.values()}, GPUS)
    restarted = Judges(EARLY)
    ((*_, state),) = judges.state(120.0)
    restarted.restore(RUN, state, 0.0)
    restarted.update(121.0, {RUN: readings(4)}, GPUS)
    assert restarted.judges[RUN].history.past(121.0).longest_pause is not None


def test_each_runs_saved_state_has_its_own_age() -> None:
    judges, others = Judges(EARLY), ("other", "1001")
    for at, ranks in Training().train(120):
        judges.update(at, {RUN: ranks.values()}, GPUS)
    ((*_, state),) = judges.state(120.0)
    restarted = Judges(EARLY)
    restarted.restore(RUN, state, 10.0)
    restarted.restore(others, state, 500.0)
    restarted.update(121.0, {RUN: readings(4), others: readings(4)}, GPUS)
    older, newer = ([row[0] for row in restarted.judges[run].history.state(121.0)["rows"]] for run in (others, RUN))
    assert newer
    assert [old - new for old, new in zip(older, newer, strict=True)] == pytest.approx([490.0] * len(newer))


def test_garbage_in_the_saved_history_of_a_run_is_ignored() -> None:
    judges = Judges()
    judges.restore(RUN, {"rows": [["old", 1, 2]]}, 0.0)
    assert judges.update(60.0, {RUN: readings()}, GPUS).verdicts


def test_the_remembered_runs_of_an_owner_who_keeps_renaming_are_limited() -> None:
    judges, others = Judges(), ("other", "1001")
    judges.update(59.0, {others: begun(1, 50.0)}, GPUS)
    ranks = readings(1)
    for number in range(REMEMBERED_LIMIT + 20):
        judges.update(60.0 + number, {(f"run-{number}", "1000"): ranks}, GPUS)
    assert len(judges.judges) == REMEMBERED_LIMIT + 1
    assert {others, (f"run-{REMEMBERED_LIMIT + 19}", "1000")} <= judges.judges.keys()


def test_a_forged_record_ends_no_diagnosis_of_others() -> None:
    def forge(one: RankReading) -> RankReading:
        return counting(replace(one, stage=one.rank), steps=1e-300 * one.at, micro_steps=1e60)

    victim, hostile, judges = Training(2), Training(2, adjust=forge), Judges()
    for (at, ranks), (_, forged) in zip(victim.train(20), hostile.train(20), strict=True):
        found = judges.update(at, {RUN: ranks.values(), ("evil", "6666"): forged.values()}, GPUS)
    assert RUN in {verdict.run for verdict in found.verdicts}


def test_a_run_that_cannot_be_computed_is_not_judged(monkeypatch) -> None:
    def update(judge: RunJudge, at: float, ranks: Any) -> Verdict:
        return Verdict(judge.run, at) if judge.run == RUN else Verdict(judge.run, 1.0 / (at - at))

    monkeypatch.setattr(RunJudge, "update", update)
    found = Judges().update(60.0, {RUN: readings(), ("evil", "6666"): readings()}, GPUS)
    assert [verdict.run for verdict in found.verdicts] == [RUN]
    assert found.not_judged == {("evil", "6666"): "impossible_values"}


def test_a_living_run_is_judged_after_many_short_runs() -> None:
    """A sweep: each run has its own name, and is shown for ten minutes after its end."""
    (one,) = readings(1)
    runs = {
        (f"trial-{n}", "1000"): [replace(one, began=float(n), ended=Ending("finished", 40.0 + n))]
        for n in range(RUNS_LIMIT)
    }
    runs["living", "1000"] = [replace(one, began=50.0)]
    assert ("living", "1000") not in Judges().update(61.0, runs, GPUS).not_judged
