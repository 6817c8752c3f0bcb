"""The runs that an exporter judges: it has to show all of their ranks and read all of their GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from testing.readings import EARLY, RUN, Training, counting, spend

from rankscope_exporter.diagnosis.judge import READINGS_LIMIT, RunJudge, Verdict
from rankscope_exporter.diagnosis.judged import (
    RANKS_LIMIT,
    REMEMBERED_LIMIT,
    RUNS_LIMIT,
    RUNS_OF_ALL_OWNERS,
    Judged,
    Judges,
    Limits,
)
from rankscope_exporter.diagnosis.readings import Ending, GpuCounters, RankReading, Run

GPUS = {f"GPU-{number}" for number in range(8)}


def readings(count: int = 2, **changes: Any) -> list[RankReading]:
    """Return all ranks of a run after a minute."""
    return [replace(reading, **changes) for reading in Training(count).read_after(60).values()]


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


def test_a_run_whose_gpu_is_lost_is_still_judged() -> None:
    judges, lost = Judges(), GPUS - {"GPU-1"}
    assert judges.update(60.0, {RUN: readings()}, lost).not_judged == {RUN: "gpus_unknown"}
    assert judges.update(61.0, {RUN: readings()}, GPUS).verdicts
    assert judges.update(62.0, {RUN: readings()}, lost).verdicts
    moved = readings(uuid="GPU-of-another-machine")
    assert judges.update(63.0, {RUN: moved}, lost).not_judged == {RUN: "gpus_unknown"}


def test_a_hang_of_a_run_whose_gpu_is_lost_is_found() -> None:
    judges, training = Judges(), Training(2)
    for at, ranks in training.train(60, spend("backward", 0.1, 1)):
        judges.update(at, {RUN: [*ranks.values()]}, GPUS)
    stuck = [replace(one, gpu=None, counters=replace(one.counters, gpu=GpuCounters())) for one in ranks.values()]
    for second in range(1, 400):
        later = [replace(one, at=one.at + second) for one in stuck]
        found = judges.update(at + second, {RUN: later}, GPUS - {"GPU-1"})
    assert [finding.kind for finding in found.verdicts[0].findings] == ["hang"]


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
    assert restarted.judges[RUN].history.past(121.0).shortest_limit is not None


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


def kept_bytes(judges: Judges) -> int:
    return sum(judge.kept_bytes(is_growing=False) for judge in judges.judges.values())


def test_a_hundred_owners_displace_no_run_that_was_judged_before() -> None:
    judges, mine = Judges(), ("mine", "1000")
    judges.update(59.0, {mine: begun(4, 50.0)}, GPUS)
    many: dict[Run, list[RankReading]] = {("x", str(owner)): begun(1, 1.0) for owner in range(5000, 5100)}
    found = judges.update(60.0, {**many, mine: begun(4, 50.0)}, GPUS)
    assert mine in {verdict.run for verdict in found.verdicts}
    assert len(found.verdicts) == RUNS_OF_ALL_OWNERS
    assert set(found.not_judged.values()) == {"too_many_runs"}


def test_owners_of_one_principal_have_one_limit() -> None:
    many: dict[Run, list[RankReading]] = {("x", str(owner)): begun(1, 1.0) for owner in range(5000, 5100)}
    found = Judges(principal=lambda owner: "1001" if owner[0] == "5" else owner).update(60.0, many, GPUS)
    assert len(found.verdicts) == RUNS_LIMIT


def test_the_memory_of_all_runs_is_limited_and_newcomers_take_none_of_an_older_run() -> None:
    limits = Limits(remembered_bytes=4_000_000)
    judges, mine, ranks = Judges(limits=limits), ("mine", "1000"), readings(1)
    judges.update(59.0, {mine: begun(4, 50.0)}, GPUS)
    for second in range(60):
        runs: dict[Run, list[RankReading]] = {("x", str(5000 + 20 * second + number)): ranks for number in range(20)}
        judges.update(60.0 + second, runs, GPUS)
    assert mine in judges.judges
    assert 20 < len(judges.judges) < 1000
    now = sum(judges.judges[run].kept_bytes(is_growing=False) for run in runs)
    assert kept_bytes(judges) - now < limits.remembered_bytes


def test_a_run_of_much_memory_keeps_fewer_readings_and_others_as_many_as_before() -> None:
    limits = Limits(remembered_bytes=1_000_000)
    judges, big, small = Judges(limits=limits), Training(8), Training(2)
    for (at, many), (_, few) in zip(big.train(100), small.train(100), strict=True):
        judges.update(at, {("big", "6666"): many.values(), RUN: few.values()}, GPUS)
    assert len(judges.judges[RUN]._readings) == READINGS_LIMIT
    assert 8 <= len(judges.judges["big", "6666"]._readings) < READINGS_LIMIT
    assert kept_bytes(judges) < 1.1 * limits.remembered_bytes


def test_a_run_that_takes_too_much_cpu_time_is_not_judged_and_has_a_reason(monkeypatch) -> None:
    spent, hostile = [0.0], ("bomb", "6666")
    update = RunJudge.update

    def costly(judge: RunJudge, at: float, ranks: Any) -> Verdict:
        spent[0] += 10.0 if judge.run == hostile else 0.001
        return update(judge, at, ranks)

    monkeypatch.setattr(RunJudge, "update", costly)
    judges = Judges(cpu_clock=lambda: spent[0])
    for second in range(30):
        found = judges.update(60.0 + second, {hostile: readings(), RUN: readings()}, GPUS)
        assert RUN in {verdict.run for verdict in found.verdicts}
    assert found.not_judged == {hostile: "too_much_cpu_time"}


def test_a_saved_run_that_is_not_seen_again_is_forgotten() -> None:
    before, judges = Judges(), Judges()
    before.update(60.0, {RUN: readings(), ("gone", "1000"): readings()}, GPUS)
    for *run, saved in before.state(60.0):
        judges.restore(tuple(run), saved, 0.0)
    judges.update(61.0, {RUN: readings()}, GPUS)
    assert [*judges._saved] == [("gone", "1000")]
    judges.update(61.0 + 1000.0, {}, GPUS)
    assert not judges._saved


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
