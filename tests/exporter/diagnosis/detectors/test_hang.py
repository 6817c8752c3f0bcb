"""Hangs: the time after which a run hangs, and the rank that it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from testing.readings import RUN, Adjust, Change, Training, Trial, hang, spend, window

from rankscope_exporter.diagnosis.detectors.hang import detect
from rankscope_exporter.diagnosis.detectors.state import Past
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import Ending, GpuCounters, RankReading
from rankscope_exporter.diagnosis.standstill import Standstill
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.diagnosis.words import sentence

LIMITS = Thresholds()


def unchanged(reading: RankReading) -> RankReading:
    return reading


def hanging(*changes: Change, ranks: int = 4, adjust: Adjust = unchanged, clock: str = "host") -> Candidate | None:
    """Return the possible hang of a run that stops after ten seconds of steps."""
    trial = Trial(Training(ranks, clock=clock, adjust=adjust)).trained(10)
    verdict = trial.train(100, *changes)
    found = [one.candidate for one in (*verdict.findings, *verdict.pending)]
    return next((one for one in found if one.kind == "hang"), None)


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("phase", ["backward", "data_wait", "other"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rank_that_the_others_wait_for_is_named_with_its_phase(ranks, phase, clock) -> None:
    found = hanging(hang(phase, 1), ranks=ranks, clock=clock)
    assert found
    assert (found.place.rank, found.cause) == (1, phase)
    assert found.evidence["behind"] == found.evidence["ranks_behind"] == 1.0


@pytest.mark.parametrize("clock", ["host", "device"])
def test_if_all_ranks_are_in_a_collective_none_is_behind(clock) -> None:
    found = hanging(hang("collective_wait"), clock=clock, adjust=in_collective(clock))
    assert found
    assert found.cause == "inside_collective"
    assert found.evidence["ranks_behind"] == 0.0


def in_collective(clock: str) -> Adjust:
    phase = "device_wait" if clock == "device" else "collective_wait"
    return lambda reading: replace(reading, phase=phase if reading.phase == "collective_wait" else reading.phase)


def counted(*counts: Mapping[str, float], phase: str = "collective_wait") -> Adjust:
    """Return ranks that have issued these numbers of collectives by group."""
    return lambda reading: replace(reading, issued=counts[reading.rank], phase=phase)


def test_a_rank_that_has_issued_fewer_collectives_is_behind_in_any_phase() -> None:
    found = hanging(hang("backward"), adjust=counted(*[{"0-3": 9.0}] * 3, {"0-3": 7.0}))
    assert found
    assert (found.place.rank, found.cause, found.evidence["behind"]) == (3, "collective_wait", 2.0)


def test_the_rank_at_the_end_of_a_chain_of_groups_is_named() -> None:
    """Rank 1 waits for rank 2 in one group, and rank 0 for rank 1 in another."""
    chain = counted({"0-1": 5.0}, {"0-1": 4.0, "1-2": 5.0}, {"1-2": 4.0}, {})
    found = hanging(hang("backward"), adjust=chain)
    assert found
    assert (found.place.rank, found.evidence["ranks_behind"]) == (2, 1.0)


@pytest.mark.parametrize("phase", ["collective_wait", "device_wait", "forward"])
def test_a_rank_that_has_not_used_a_group_yet_has_issued_nothing_in_it(phase) -> None:
    """The first collective of a group hangs, such as the first exchange between experts."""
    first = counted(
        {"0-3": 9.0, "0-2:2": 1.0}, {"0-3": 9.0, "1-3:2": 1.0}, {"0-3": 9.0}, {"0-3": 9.0, "1-3:2": 1.0}, phase=phase
    )
    found = hanging(hang("backward"), adjust=first)
    assert found
    assert (found.place.rank, found.evidence["behind"], found.evidence["ranks_behind"]) == (2, 1.0, 1.0)


def test_without_counts_a_rank_outside_of_collectives_is_named() -> None:
    found = hanging(hang("data_wait", 2), adjust=lambda reading: replace(reading, issued={}))
    assert found
    assert (found.place.rank, found.cause, found.evidence["ranks_behind"]) == (2, "data_wait", 0.0)


def test_a_host_that_waits_for_its_device_is_in_a_collective_only_where_devices_wait() -> None:
    alike = counted(*[{"0-3": 9.0}] * 4, phase="device_wait")
    by_device, by_host = (hanging(hang("backward"), adjust=alike, clock=clock) for clock in ("device", "host"))
    assert by_device
    assert by_host
    assert by_device.cause == "inside_collective"
    assert by_host.cause == "device_wait"


def test_a_hang_is_found_after_45_seconds_if_the_run_has_a_pace() -> None:
    trial = Trial().trained(60)
    seconds, finding = trial.find(hang("backward", 2), kinds=("hang",))
    assert 45 <= seconds <= 48
    assert finding
    assert (finding.severity, finding.candidate.place.rank) == ("critical", 2)
    assert finding.since == pytest.approx(60.0, abs=1.0)


def test_an_early_hang_is_found_within_90_seconds_if_a_rank_is_behind_in_collectives() -> None:
    trial = Trial().trained(15)
    seconds, finding = trial.find(hang("backward", 2), kinds=("hang",))
    assert 88 <= seconds <= 92
    assert finding


def test_an_early_stall_of_ranks_with_equal_counts_may_be_compilation_and_takes_five_minutes() -> None:
    trial = Trial().trained(15)
    seconds, finding = trial.find(hang("forward"), kinds=("hang",))
    assert 298 <= seconds <= 302
    assert finding


@pytest.mark.parametrize(("phase", "after"), [("other", 80.0), ("backward", 45.0)])
def test_a_run_that_waited_long_for_the_same_before_has_more_time(phase, after) -> None:
    trial = Trial().trained(60)
    trial.train(1, spend("other", 20.0, 0))
    trial.train(60)
    seconds, _ = trial.find(hang(phase, 2), kinds=("hang",))
    assert seconds == pytest.approx(after, abs=4.0)


@pytest.mark.parametrize(
    ("phase", "pace", "busy", "idle", "needed"),
    [
        ("checkpoint", {}, None, 0.0, LIMITS.planned),
        ("checkpoint", {"checkpoint": 2400.0}, None, 0.0, 2400.0),
        ("checkpoint", {"checkpoint": 20.0}, None, 0.0, LIMITS.stuck),
        ("checkpoint", {"evaluation": 100.0}, None, 0.0, LIMITS.planned),
        ("startup", {}, None, 0.0, LIMITS.planned),
        ("data_wait", {}, None, 0.0, LIMITS.stuck_floor),
        ("backward", {}, None, 0.0, LIMITS.stuck),
        ("backward", {}, 0.1, 1e3, LIMITS.stuck),
        ("backward", {}, 0.9, 0.0, LIMITS.stuck_floor),
        ("backward", {}, None, 3e3, LIMITS.stuck_floor),
        ("backward", {"backward": 120.0}, 0.9, 0.0, 120.0),
        ("backward", {"backward": 1200.0, "forward": 2400.0}, None, 0.0, 1200.0),
        ("other", {}, None, 0.0, 2 * LIMITS.planned),
    ],
)
def test_the_stall_limit_depends_on_the_phase_the_history_and_what_works(phase, pace, busy, idle, needed) -> None:
    def standing(one: RankReading) -> RankReading:
        gpu = GpuCounters(None if busy is None else busy * one.at)
        return replace(one, phase=phase, issued={}, counters=replace(one.counters, gpu=gpu))

    facts = window(Training(adjust=standing), hang("other"), seconds=1500.0)
    living = [one.now for one in facts.run.ranks]
    found = Standstill(living[0], phase, "outside" if phase == "other" else phase, 4e3, {}, False, False)
    (hangs,) = detect(facts, Past(found, pace, LIMITS.stuck_floor, idle={0: idle}))
    assert hangs.needed == needed


def test_a_stall_is_shown_from_its_first_seconds_with_the_rank_and_the_remaining_time() -> None:
    trial = Trial().trained(15)
    verdict = trial.train(8, hang("backward", 2))
    (pending,) = verdict.pending
    assert not verdict.findings
    assert (pending.candidate.kind, pending.candidate.place.rank, pending.lacks) == ("hang", 2, "time")
    assert pending.remaining == pytest.approx(90.0 - 8.0, abs=1.0)


def test_a_run_that_makes_progress_again_does_not_hang() -> None:
    trial = Trial().trained(60)
    trial.train(1, spend("other", 55.0, 1))
    assert [one.kind for one in trial.train(50).findings] == ["hang"]
    assert not trial.train(10).findings


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_single_process_outside_of_phases_is_interactive(ranks) -> None:
    trial = Trial(Training(ranks)).trained(60)
    verdict = trial.train(300, hang("other", 0))
    kinds = [finding.kind for finding in verdict.findings], [pending.lacks for pending in verdict.pending]
    assert kinds == (([], ["interactive"]) if ranks == 1 else (["hang"], []))


def test_a_single_process_that_stops_in_a_phase_hangs() -> None:
    trial = Trial(Training(1)).trained(60)
    assert trial.train(60, hang("data_wait")).findings[0].candidate.cause == "data_wait"


def test_a_long_checkpoint_and_a_long_start_up_are_not_hangs() -> None:
    trial = Trial(Training(4, startup=900.0)).trained(1000)
    trial.train(1, spend("checkpoint", 900.0, 0))
    trial.train(950)
    assert "hang" not in trial.kinds()


def test_while_a_run_hangs_all_of_its_gpu_time_is_lost_to_the_stall() -> None:
    trial = Trial().trained(60)
    assert trial.train(60, hang("backward", 2)).lost == {"stall": 1.0}


@pytest.mark.parametrize("loss", [spend("backward", 0.1, 1), spend("data_wait", 0.1), spend("h2d_copy", 0.1)])
def test_a_run_that_hangs_has_no_other_finding(loss) -> None:
    trial = Trial()
    assert trial.train(60, loss).findings
    assert [finding.kind for finding in trial.train(60, hang("forward", 2)).findings] == ["hang"]


def test_long_steps_are_not_a_hang() -> None:
    assert hanging(spend("backward", 3.0, 1)) is None


@pytest.mark.parametrize("phase", ["collective_wait", "other"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_hang_names_the_rank_that_has_finished(ranks, phase) -> None:
    """It had fewer batches than the others. With CUDA, the others' host may be outside of all phases."""

    def finished(one: RankReading) -> RankReading:
        return replace(one, ended=Ending("finished", 110.0)) if one.rank == 1 else replace(one, phase=phase)

    training = Training(ranks)
    trial = Trial(training).trained(100)
    training.adjust = finished
    after, finding = trial.find(hang("backward", 1), kinds=("hang",))
    assert finding
    assert after <= 60.0
    assert (finding.candidate.place.rank, finding.candidate.cause) == (1, "finished")
    expected = "Run llm hangs: Rank 1 (node-a, GPU 1) has finished, and the other ranks wait for it"
    assert sentence(RUN, finding.candidate) == expected


def test_a_rank_that_works_on_after_the_others_have_finished_does_not_hang() -> None:
    """It uploads the result."""
    training = Training(2)
    trial = Trial(training).trained(100)
    training.adjust = lambda one: replace(
        one, phase="other", ended=Ending("finished", 110.0) if one.rank == 1 else None, issued={"0-1": 400.0}
    )
    assert not trial.trained(400, hang("backward", 0, 1)).kinds()


@pytest.mark.parametrize("issued", [{"0-3": 200.0}, {}])
def test_a_hang_does_not_name_a_rank_that_left_long_before(issued) -> None:
    """Rank 1 calls `uninstrument` and trains on; rank 2 hangs later."""

    def left(one: RankReading) -> RankReading:
        is_left = one.rank == 1 and one.at > 50.0
        return replace(one, ended=Ending("finished", 50.0 if issued else 115.0), issued=issued) if is_left else one

    trial = Trial(Training(4, adjust=left)).trained(115)
    _, finding = trial.find(hang("backward", 2), kinds=("hang",))
    assert finding
    assert (finding.candidate.place.rank, finding.candidate.cause) == (2, "backward")
