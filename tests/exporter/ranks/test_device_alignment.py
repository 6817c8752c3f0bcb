"""Steps aligned on the device clock: hosts that run ahead, different measured steps, and no mix of clocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.simulated_job import (
    COMPUTE,
    DELAY,
    TRANSFER,
    Aligning,
    AsynchronousJob,
    Durations,
    Job,
    SimulatedRank,
    even,
    lagging,
    rotating,
    scan,
)
from validation.fuzz.rank_files import check

from rankscope.record import layout
from rankscope.record.sampling import is_sampled
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import REMEMBERED


def run_and_poll(job: AsynchronousJob, alignment: Aligning, last: int, plan: Callable[[int, int], Durations]) -> None:
    """Run the job and poll as often as the exporter does: before the ring is overwritten."""
    for first in range(1, last + 1, 20):
        job.run(range(first, min(first + 20, last + 1)), plan)
        alignment.poll()


def test_a_lagging_rank_gets_the_blame_although_no_host_waits(run_dir: Path, alignment: Aligning) -> None:
    run_and_poll(AsynchronousJob(run_dir, 0, 0, 0, 0), alignment, 100, lagging("forward"))
    found = alignment.alignments()
    assert {a.steps for a in found} == {100}
    assert found[2].blame["forward"] == pytest.approx(100 * DELAY)
    assert sum(sum(a.blame.values()) for a in found) == pytest.approx(100 * DELAY)
    assert [a.skew for a in found] == pytest.approx([100 * DELAY, 100 * DELAY, 0, 100 * DELAY])
    assert {round(a.floor / a.steps, 6) for a in found} == {TRANSFER}


def test_a_step_is_as_long_as_its_phases_on_the_device(run_dir: Path, alignment: Aligning) -> None:
    AsynchronousJob(run_dir, 0, 0).run(range(1, 11), even)
    assert [a.seconds for a in alignment.poll().alignments()] == pytest.approx([10 * (COMPUTE + TRANSFER)] * 2)


def test_a_rotating_straggler_and_a_slow_network_are_distinguished(run_dir: Path, alignment: Aligning) -> None:
    run_and_poll(AsynchronousJob(run_dir, 0, 0, 0, 0, run="rotating"), alignment, 100, rotating)
    slow = AsynchronousJob(run_dir, 0, 0, 0, 0, run="network")
    slow.run(range(1, 21), even, transfer=DELAY)
    shares = {(a.key[0], a.key[1]): (a.floor / a.seconds, a.skew / a.seconds) for a in alignment.poll().alignments()}
    assert all(floor < 0.1 < 0.2 < skew for (run, _), (floor, skew) in shares.items() if run == "rotating")
    assert all(floor > 0.4 and skew < 1e-6 for (run, _), (floor, skew) in shares.items() if run == "network")
    assert len(shares) == 8


@pytest.mark.parametrize("ahead", [(0, 5), (12, 0), (3, 3)])
def test_hosts_that_run_ahead_by_different_numbers_of_steps_are_aligned_by_issued_collectives(
    run_dir: Path, alignment: Aligning, ahead: tuple[int, int]
) -> None:
    AsynchronousJob(run_dir, *ahead).run(range(1, 21), even)
    assert {a.steps for a in alignment.poll().alignments()} == {20}


@pytest.mark.parametrize(("ahead", "aligned"), [((0, 0), True), ((0.5, 0), True), ((1, 0), False), ((0, 5), False)])
def test_without_counted_collectives_the_hosts_ends_decide(
    run_dir: Path, alignment: Aligning, ahead: tuple[float, float], aligned: bool
) -> None:
    AsynchronousJob(run_dir, *ahead).run(range(1, 21), even, sequence=lambda _step, rank: rank)
    assert {a.steps for a in alignment.poll().alignments()} == ({20} if aligned else set())


def test_steps_with_the_same_number_but_different_collectives_are_not_the_same(
    run_dir: Path, alignment: Aligning
) -> None:
    AsynchronousJob(run_dir, 0, 0).run(range(1, 21), even, sequence=lambda step, rank: 7 * (step + rank))
    assert alignment.poll().alignments() == []


def test_only_steps_that_all_ranks_have_measured_count(run_dir: Path, alignment: Aligning) -> None:
    levels = (1, 2, 3)  # the ranks' sampling levels differ slightly
    job = AsynchronousJob(run_dir, 0, 0, 0)
    job.run(range(1, 33), lagging("backward", 1), is_measured=lambda step, rank: is_sampled(step, levels[rank]))
    assert {a.steps for a in alignment.poll().alignments()} == {4}
    assert alignment.alignments()[1].blame["backward"] == pytest.approx(4 * DELAY)


def test_a_step_counts_when_the_last_device_has_finished_it(run_dir: Path, alignment: Aligning) -> None:
    job = AsynchronousJob(run_dir, 0, 0)
    job.run(range(1, 4), even, is_measured=lambda step, rank: step < 3 or rank == 0)
    assert {a.steps for a in alignment.poll().alignments()} == {2}
    job.ranks[1].measure({**even(3, 1), "collective_wait": TRANSFER}, 21)
    alignment.poll()
    assert {a.steps for a in alignment.poll().alignments()} == {3}


def test_a_rank_that_is_not_measured_yet_is_not_compared(run_dir: Path, alignment: Aligning) -> None:
    job = AsynchronousJob(run_dir, 0, 0)
    job.run(range(1, 11), even, is_measured=lambda _step, rank: rank == 0)
    assert alignment.poll().alignments() == []
    job.run(range(11, 21), even)
    assert {a.steps for a in alignment.poll().alignments()} == {10}


def test_ranks_that_wait_on_the_host_are_measured_there_while_one_has_no_device(
    run_dir: Path, alignment: Aligning
) -> None:
    job = Job(run_dir, ranks=2, backend="gloo")
    for step in range(21):
        job.run(1, lagging("forward", 1))
        job.ranks[0].measure({"optimizer": 0.001, "collective_wait": 0.001}, step)
    assert {a.steps for a in alignment.poll().alignments()} == {20}
    assert alignment.alignments()[1].blame["forward"] == pytest.approx(20 * DELAY)


def test_after_a_change_to_the_device_clock_no_step_counts_twice(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir, ranks=2, backend="gloo").run(20, even)
    alignment.poll()
    for rank in job.ranks:
        rank.measure({"forward": 1.0}, 20)
    assert {a.steps for a in alignment.poll().alignments()} == {19}
    job.run(1, even)
    for rank in job.ranks:
        rank.measure({"forward": 1.0}, 21)
    assert [(a.steps, a.seconds) for a in alignment.poll().alignments()] == [(20, pytest.approx(1.0 + 19 * 0.045))] * 2


def test_restarted_ranks_are_not_aligned_with_old_steps_of_the_others(run_dir: Path, alignment: Aligning) -> None:
    AsynchronousJob(run_dir, 0, 0).run(range(1, 21), even)
    (run_dir / "r.0.990.0.rank").unlink()
    AsynchronousJob(run_dir, 0, start=1100.0).run(range(1, 21), even)  # the same steps, and the same collectives
    assert alignment.poll().alignments() == []


def test_remembered_steps_are_bounded(run_dir: Path, alignment: Aligning) -> None:
    run_and_poll(AsynchronousJob(run_dir, 0, 0), alignment, 200, even)
    assert all(len(record.steps) <= REMEMBERED for record in alignment._alignment._records.values())


def test_all_phases_except_waiting_and_start_up_can_have_blame(run_dir: Path, alignment: Aligning) -> None:
    AsynchronousJob(run_dir, 0, 0).run(range(1, 3), even)
    assert set(alignment.poll().alignments()[0].blame) == {*layout.PHASES, "unknown"} - {"collective_wait", "startup"}


NUMBERS = st.sampled_from([0.0, 5e-324, 1.0, 2.0, 1e3, 2.0**53, 2.0**199]) | st.floats(0, 9)


@settings(max_examples=200)
@given(
    entries=st.lists(st.lists(NUMBERS, min_size=layout.DEVICE_RING_WIDTH - 1, max_size=layout.DEVICE_RING_WIDTH - 1)),
    pace=st.lists(NUMBERS, min_size=2, max_size=2),
)
def test_any_content_of_two_ranks_rings_makes_valid_metrics(
    run_dir: Path, entries: list[list[float]], pace: list[float]
) -> None:
    for path in run_dir.glob("*.rank"):
        path.unlink()
    for number in range(2):
        rank = SimulatedRank(run_dir, number, 0.0, backend="nccl")
        slots = rank.writer.slots
        for nth, entry in enumerate(entries, start=1):
            rank.writer.device_ring[nth % layout.DEVICE_RING_STEPS][:] = array("d", [nth, *entry])
        slots[layout.INDEX["device_steps"]] = len(entries)
        slots[layout.INDEX["step_seconds"]], slots[layout.INDEX["steps"]] = pace
    families = AlignedSteps().poll(scan(RunDirectory([run_dir])))
    check(families)
    assert all(sample.value >= 0 for family in families for sample in family.samples)
