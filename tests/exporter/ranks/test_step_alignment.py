"""Aligned steps: they distinguish a rotating straggler from a slow network, and unmatched steps do not count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from testing.simulated_job import (
    COMPUTE,
    DELAY,
    TRANSFER,
    Aligning,
    Durations,
    Job,
    SimulatedRank,
    even,
    lagging,
    rotating,
)

from rankscope.record import layout
from rankscope_exporter.ranks.step_alignment import REMEMBERED, UNKNOWN, Alignment


def shares(alignments: Sequence[Alignment]) -> tuple[float, float]:
    """Return floor and skew of all ranks together, as ratios of their steps' time."""
    seconds = sum(alignment.seconds for alignment in alignments)
    return sum(a.floor for a in alignments) / seconds, sum(a.skew for a in alignments) / seconds


def blames(alignments: Sequence[Alignment]) -> list[float]:
    return [sum(alignment.blame.values()) for alignment in alignments]


def test_a_rotating_straggler_is_high_skew_a_low_floor_and_blame_on_all_ranks(
    run_dir: Path, alignment: Aligning
) -> None:
    Job(run_dir).run(100, rotating)
    floor, skew = shares(alignment.poll().alignments())
    assert floor < 0.1
    assert skew > 0.2
    assert max(blames(alignment.alignments())) < 0.5 * sum(blames(alignment.alignments()))
    assert all(a.blame["data_wait"] == pytest.approx(sum(a.blame.values())) for a in alignment.alignments())


def test_a_slow_network_is_a_high_floor_without_skew_or_blame(run_dir: Path, alignment: Aligning) -> None:
    Job(run_dir).run(100, even, transfer=DELAY)
    floor, skew = shares(alignment.poll().alignments())
    assert floor > 0.4
    assert skew == pytest.approx(0, abs=1e-6)
    assert sum(blames(alignment.alignments())) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "checkpoint", "other"])
def test_one_lagging_rank_gets_all_the_blame_for_its_phase(run_dir: Path, alignment: Aligning, phase: str) -> None:
    Job(run_dir).run(51, lagging(phase))
    laggard = alignment.poll().alignments()[2]
    assert laggard.blame[phase] == pytest.approx(50 * DELAY)
    assert sum(blames(alignment.alignments())) == pytest.approx(50 * DELAY)
    assert laggard.skew == pytest.approx(0, abs=1e-6)
    assert [a.skew for a in alignment.alignments() if a is not laggard] == pytest.approx([50 * DELAY] * 3)


def test_blame_that_no_phase_explains_is_unknown(run_dir: Path, alignment: Aligning) -> None:
    def late_by_several(step: int, rank: int) -> Durations:
        more = 0.01 if rank == 1 else 0.0
        return dict.fromkeys(("data_wait", "forward", "backward"), 0.01 + more)

    Job(run_dir).run(51, late_by_several)
    assert alignment.poll().alignments()[1].blame[UNKNOWN] == pytest.approx(50 * 0.03)


def test_each_step_counts_once_even_if_records_are_read_repeatedly(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir)
    for _ in range(10):
        job.run(20, rotating)
        alignment.poll()
        alignment.poll()
    assert {a.steps for a in alignment.alignments()} == {199}  # the first step has no beginning
    assert {a.key for a in alignment.alignments()} == {("r", str(rank), str(os.getuid())) for rank in range(4)}


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_one_scan_does_not_show_misses_no_step(run_dir: Path, alignment: Aligning, ends: bool) -> None:
    """A record is unreadable while its info changes, as at the end of its rank."""
    job = Job(run_dir).run(20, rotating)
    alignment.poll()
    job.run(20, rotating)
    record = max(run_dir.iterdir())
    hidden = record.rename(run_dir.parent / "hidden")
    alignment.poll()
    hidden.rename(record)
    assert [a.steps for a in alignment.poll(alive=not ends).alignments()] == [39] * 4


def test_missed_steps_do_not_count(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir).run(1000, even)
    missed = alignment.poll().alignments()[0].steps
    assert missed <= layout.RING_STEPS
    job.run(10, even)
    assert alignment.poll().alignments()[0].steps == missed + 10
    assert alignment.alignments()[0].seconds == pytest.approx((missed + 10) * (COMPUTE + TRANSFER))


def test_a_rank_that_is_alone_here_is_not_aligned(run_dir: Path, alignment: Aligning) -> None:
    Job(run_dir, ranks=1).run(50, even)
    assert alignment.poll().alignments() == []


@pytest.mark.parametrize(("backend", "steps"), [("gloo", {20}), ("nccl", set()), ("cpu:gloo,cuda:nccl", set())])
def test_host_steps_are_not_aligned_if_the_gpu_waits(
    run_dir: Path, alignment: Aligning, backend: str, steps: set[int]
) -> None:
    Job(run_dir, backend=backend).run(21, even)
    assert {a.steps for a in alignment.poll().alignments()} == steps


def test_runs_and_groups_are_aligned_separately(run_dir: Path, alignment: Aligning) -> None:
    slow, fast = Job(run_dir, run="slow"), Job(run_dir, run="fast", start=1000.5)
    slow.run(21, lagging("forward"))
    fast.run(51, even, transfer=0.001)
    assert {a.key[0]: a.steps for a in alignment.poll().alignments()} == {"slow": 20, "fast": 50}
    assert {a.key[0]: round(a.floor / a.steps, 4) for a in alignment.alignments()} == {"slow": TRANSFER, "fast": 0.001}


def test_ranks_of_different_pipeline_stages_are_not_compared(run_dir: Path, alignment: Aligning) -> None:
    stages = {"groups": ["0-3", "0,2", "1,3"], "pairwise": ["1", "2"]}
    Job(run_dir, **stages).run(21, lagging("forward"))
    by_rank = {a.key[1]: a for a in alignment.poll().alignments()}
    assert {a.steps for a in by_rank.values()} == {20}
    slow = max(by_rank.values(), key=lambda a: sum(a.blame.values()))
    others = [a for a in by_rank.values() if a is not slow]
    assert sum(sum(a.blame.values()) for a in others) == 0.0


def test_a_rank_that_was_instrumented_later_is_aligned_by_the_ends_of_its_steps(
    run_dir: Path, alignment: Aligning
) -> None:
    job = Job(run_dir, ranks=3).run(40, lagging("forward", laggard=0))
    job.ranks.append(SimulatedRank(run_dir, 3, job.ranks[0].now))
    job.run(41, lagging("forward", laggard=0))
    assert {a.steps for a in alignment.poll().alignments()} == {40}
    assert alignment.alignments()[0].blame["forward"] == pytest.approx(40 * DELAY)


def test_a_slow_end_of_the_step_is_not_mistaken_for_another_step(run_dir: Path, alignment: Aligning) -> None:
    def slow_optimizer(_step: int, rank: int) -> Durations:
        return {"optimizer": DELAY if rank == 1 else 0.001}

    Job(run_dir).run(51, even, after=slow_optimizer)
    assert {a.steps for a in alignment.poll().alignments()} == {50}
    assert alignment.alignments()[1].blame["optimizer"] == pytest.approx(50 * 0.029, rel=0.05)


def test_ranks_with_the_same_run_that_do_not_step_together_are_not_aligned(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir, ranks=1).run(50, even)
    unrelated = Job(run_dir, ranks=2, start=job.ranks[0].now + 100).ranks[1]
    for _ in range(50):
        unrelated.spend("forward", 0.07)
        unrelated.step()
    assert alignment.poll().alignments() == []


def test_ranks_whose_paces_differ_are_not_aligned(run_dir: Path, alignment: Aligning) -> None:
    for number, pace in enumerate((0.05, 0.07)):
        rank = SimulatedRank(run_dir, number, 1000.0)
        for _ in range(100):
            rank.spend("forward", pace)
            rank.step()
    assert alignment.poll().alignments() == []


def test_single_steps_that_end_more_than_their_length_apart_do_not_count(run_dir: Path, alignment: Aligning) -> None:
    pair = [SimulatedRank(run_dir, number, 1000.0) for number in range(2)]
    for step in range(26):
        for number, rank in enumerate(pair):
            rank.spend("forward", 5.0 if (step, number) == (21, 1) else 0.05)
            rank.step()
    assert {a.steps for a in alignment.poll().alignments()} == {21}  # the long step is the last common one


def test_a_restarted_rank_starts_at_zero(run_dir: Path, alignment: Aligning) -> None:
    first = Job(run_dir)
    first.run(51, even)
    alignment.poll()
    second = Job(run_dir, start=first.ranks[0].now + 10)
    for path in run_dir.glob("*1000.0.rank"):  # like the rank's next start
        path.unlink()
    assert alignment.poll().alignments() == []
    second.run(21, even)
    assert {a.steps for a in alignment.poll().alignments()} == {20}


def test_restarted_ranks_are_not_aligned_with_old_steps_of_the_others(run_dir: Path, alignment: Aligning) -> None:
    first = Job(run_dir)
    first.run(51, even)
    alignment.poll()
    for path in run_dir.glob("r.[01].1000.0.rank"):
        path.unlink()
    Job(run_dir, ranks=2, start=first.ranks[0].now + 0.5).run(51, even)
    assert sorted((a.key[1], a.steps) for a in alignment.poll().alignments()) == [("2", 50), ("3", 50)]


def test_published_values_do_not_change_while_they_are_read(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir).run(11, lagging("forward"))
    before = alignment.poll().alignments()
    job.run(10, lagging("forward"))
    alignment.poll()
    assert before[2].steps == 10
    assert before[2].blame["forward"] == pytest.approx(10 * DELAY)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_remembered_steps_are_bounded(run_dir: Path, alignment: Aligning, backend: str) -> None:
    job = Job(run_dir, backend=backend)
    for _ in range(3):
        job.run(100, even)
        alignment.poll()
    assert all(len(record.steps) <= REMEMBERED for record in alignment._alignment._records.values())
