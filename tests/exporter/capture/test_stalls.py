"""The times at which a run is captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import even

from rankscope_exporter.capture.stalls import LEAST_SECONDS, START_SECONDS, Stalls
from rankscope_exporter.diagnosis.readings import Ending
from rankscope_exporter.ranks.look import Look


class Watched:
    """A job, and the reasons for which it was captured."""

    def __init__(self, run_dir: Path, **labels: str) -> None:
        self.job = JudgedJob(run_dir, **labels)
        self.reasons: list[str] = []
        stalls = Stalls()
        self.job.diagnosis.listeners = [lambda look: self.reasons.extend(reason for _, reason in stalls.update(look))]

    def trained(self, seconds: int = 40) -> Watched:
        self.job.train(seconds)
        return self


@pytest.fixture
def watched(run_dir: Path) -> Watched:
    return Watched(run_dir).trained()


def test_a_run_that_stands_still_is_captured_before_its_finding_and_again_at_it(watched: Watched) -> None:
    assert watched.reasons == [], "it has trained"
    watched.job.wait(int(LEAST_SECONDS) - 1, HUNG)
    assert watched.reasons == []
    report = watched.job.wait(int(LEAST_SECONDS) + 2, HUNG)
    assert (watched.reasons, report.findings) == (["standstill"], [])
    report = watched.job.wait(400, HUNG)
    assert [one.kind for one in report.findings] == ["hang"]
    assert watched.reasons == ["standstill", "hang"]


def test_the_next_standstill_is_captured_again(watched: Watched) -> None:
    watched.job.wait(60, HUNG)
    for rank in watched.job.job.ranks:
        rank.spend("forward", 60.0)
    watched.job.train(5)
    watched.job.wait(130, HUNG)
    assert watched.reasons == ["standstill", "standstill"]


def test_a_run_that_paused_before_is_captured_after_twice_that_time(watched: Watched) -> None:
    for rank in watched.job.job.ranks:
        rank.spend("checkpoint", 30.0)
        rank.step()
    watched.job.train(10)
    watched.reasons.clear()
    watched.job.wait(55, HUNG)
    assert watched.reasons == []
    watched.job.wait(70, HUNG)
    assert watched.reasons == ["standstill"]


def test_a_start_up_is_captured_later(run_dir: Path) -> None:
    watched = Watched(run_dir)
    watched.job.wait(int(START_SECONDS) - 5, dict.fromkeys(range(4), "startup"))
    assert watched.reasons == []
    watched.job.wait(int(START_SECONDS) + 5, dict.fromkeys(range(4), "startup"))
    assert watched.reasons == ["standstill"]


def test_a_run_whose_other_ranks_are_elsewhere_is_captured(run_dir: Path) -> None:
    watched = Watched(run_dir, world_size="8").trained()
    watched.job.wait(int(LEAST_SECONDS) + 2, HUNG)
    assert watched.job.look.judged.not_judged
    assert watched.reasons == ["standstill"]


@pytest.mark.parametrize("labels", [{}, {"world_size": "8"}])
def test_a_crash_is_captured_once(run_dir: Path, labels: dict[str, str]) -> None:
    watched = Watched(run_dir, **labels).trained()
    for second in range(1, 60):
        watched.job.poll(watched.job.now + second, ended=[2])
    assert watched.reasons == ["crash"]


def test_a_run_of_which_all_ranks_are_stopped_is_not_captured(watched: Watched) -> None:
    stalls = Stalls()
    look = watched.job.look
    found = [*stalls.update(look)]
    for second in range(1, 200):
        found += stalls.update(_at(look, look.at + second, is_stopped=True))
    assert found == []


def test_a_run_beyond_the_limits_of_its_owner_is_not_captured(watched: Watched) -> None:
    stalls, look = Stalls(), watched.job.look
    (run,) = look.readings
    limited = look._replace(judged=look.judged._replace(verdicts=(), not_judged={run: "too_many_runs"}))
    assert [*stalls.update(limited), *stalls.update(_at(limited, look.at + 500.0))] == []


def test_a_prompt_that_waits_for_input_is_not_captured(run_dir: Path) -> None:
    job = JudgedJob(run_dir, ranks=1).trained(20, even)
    stalls, look = Stalls(), job.look
    alone = {run: [replace(one, phase="other") for one in ranks] for run, ranks in look.readings.items()}
    assert [*stalls.update(look), *stalls.update(_at(look._replace(readings=alone), look.at + 500.0))] == []


def _at(look: Look, at: float, **changes: object) -> Look:
    """Return the same readings at a later time."""
    readings = {run: [replace(one, at=at, **changes) for one in ranks] for run, ranks in look.readings.items()}
    return look._replace(at=at, readings=readings)


def test_a_rank_that_ended_normally_is_no_crash(run_dir: Path) -> None:
    watched = Watched(run_dir, world_size="8").trained()
    stalls, look = Stalls(), watched.job.look
    ended = Ending("finished", look.at)
    readings = {run: [replace(one, ended=ended) for one in ranks] for run, ranks in look.readings.items()}
    assert [*stalls.update(look), *stalls.update(look._replace(at=look.at + 60.0, readings=readings))] == []
