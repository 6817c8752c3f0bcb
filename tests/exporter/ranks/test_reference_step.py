"""The reference step of a rank: the same one on all nodes, chosen by its number."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing.simulated_job import COMPUTE, Aligning, AsynchronousJob, Job, SimulatedRank, even, scan

from rankscope.record.sampling import is_sampled, next_sampled
from rankscope.record.snapshot import Step
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.reference_step import level_of, newest_sampled
from rankscope_exporter.ranks.run_directory import RunDirectory

INTERVAL = 0.3  # seconds: about seven steps of 45 ms, so one of eight is shown
LEVEL = 3


def last_sampled(newest: int) -> int:
    return max(number for number in range(newest + 1) if is_sampled(number, LEVEL))


@pytest.fixture
def alignment(run_dir: Path) -> Aligning:
    return Aligning(run_dir, INTERVAL)


def samples(run_dir: Path, name: str) -> dict[tuple[str, str], float]:
    """Return a metric's values on /metrics, by rank and the other label."""
    families = AlignedSteps(INTERVAL).poll(scan(RunDirectory([run_dir])))
    (family,) = (family for family in families if family.name == name)
    return {(s.labels["rank"], s.labels.get("clock") or s.labels["phase"]): s.value for s in family.samples}


def test_every_rank_shows_the_last_step_chosen_by_its_number(run_dir: Path, alignment: Aligning) -> None:
    Job(run_dir).run(50, even)
    assert alignment.poll().references() == {str(rank): ("host", last_sampled(50)) for rank in range(4)}


def test_a_rank_that_is_alone_on_its_node_shows_a_reference_step(run_dir: Path, alignment: Aligning) -> None:
    Job(run_dir, ranks=1).run(50, even)
    assert alignment.poll().references() == {"0": ("host", last_sampled(50))}
    assert alignment.alignments() == []


def test_a_reference_step_is_shown_until_the_next_one(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir, ranks=1).run(16, even)
    for number in range(17, 60):
        job.run(1, even)
        assert alignment.poll().references() == {"0": ("host", last_sampled(number))}


def test_steps_of_a_measured_device_are_shown(run_dir: Path, alignment: Aligning) -> None:
    job = AsynchronousJob(run_dir, 0, 4)
    job.run(range(1, 26), even, is_measured=lambda step, _rank: is_sampled(step, 1))
    assert alignment.poll().references() == {rank: ("device", last_sampled(25)) for rank in ("0", "1")}


def test_a_rarely_measured_device_shows_its_last_measured_step(run_dir: Path, alignment: Aligning) -> None:
    AsynchronousJob(run_dir, 0).run(range(1, 41), even, is_measured=lambda step, _rank: is_sampled(step, LEVEL + 2))
    alignment.poll()
    measured = [number for number in range(1, 41) if is_sampled(number, LEVEL + 2)]
    assert alignment.references() == {"0": ("device", measured[-1])}


def test_ranks_one_level_apart_share_every_second_reference_step(run_dir: Path) -> None:
    less_often, often = Aligning(run_dir, INTERVAL), Aligning(run_dir, INTERVAL / 2)
    job = Job(run_dir, ranks=1).run(2, even)
    shown: list[set[tuple[str, int]]] = [set(), set()]
    for _ in range(200):
        job.run(1, even)
        for aligning, found in zip((less_often, often), shown, strict=True):
            aligning.poll()
            found |= set(aligning.references().values())
    assert shown[0] < shown[1]
    assert len(shown[1]) == pytest.approx(2 * len(shown[0]), abs=2)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_without_a_measured_gpu_that_waits_there_is_no_reference_step(
    run_dir: Path, alignment: Aligning, backend: str
) -> None:
    Job(run_dir, backend=backend).run(50, even)
    assert alignment.poll().references() == {}


def test_the_hosts_reference_step_disappears_when_the_device_is_measured(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir, ranks=1, backend="gloo").run(50, even)
    alignment.poll()
    assert not is_sampled(50, LEVEL)
    job.ranks[0].measure({"forward": 1.0}, 50)
    assert alignment.poll().references() == {}


def test_a_new_record_of_the_rank_starts_without_a_reference_step(run_dir: Path, alignment: Aligning) -> None:
    job = Job(run_dir, ranks=1).run(50, even)
    alignment.poll()
    for path in run_dir.glob("*.rank"):
        path.unlink()
    SimulatedRank(run_dir, 0, job.ranks[0].now + 5).step()
    assert alignment.poll().references() == {}


def test_an_ended_rank_shows_no_reference_step(run_dir: Path, alignment: Aligning) -> None:
    Job(run_dir, ranks=1).run(50, even)
    alignment.poll()
    assert alignment.poll(alive=False).references() == {}


def test_the_phases_sum_to_the_length_and_always_include_waiting(run_dir: Path) -> None:
    Job(run_dir, ranks=2).run(
        50, lambda _step, rank: {**even(0, rank), "data_wait": 0.0 if rank else 0.002}, transfer=0.0
    )
    assert samples(run_dir, "rankscope_rank_reference_step") == {(r, "host"): last_sampled(50) for r in ("0", "1")}
    seconds = samples(run_dir, "rankscope_rank_reference_step_seconds")
    expected = {"forward": COMPUTE / 4, "backward": COMPUTE * 3 / 4}
    assert {phase: s for (rank, phase), s in seconds.items() if rank == "0"} == pytest.approx(
        {**expected, "data_wait": 0.002, "collective_wait": 0.0}, abs=1e-9
    )
    assert {phase: s for (rank, phase), s in seconds.items() if rank == "1"} == pytest.approx(
        {**expected, "collective_wait": 0.002}, abs=1e-9
    )


def test_the_users_own_phases_are_in_other(run_dir: Path) -> None:
    rank = SimulatedRank(run_dir, 0, 1000.0, phases=["tokenize"])
    for _ in range(50):
        rank.spend("forward", 0.03)
        rank.spend("tokenize", 0.01)
        rank.step()
    seconds = samples(run_dir, "rankscope_rank_reference_step_seconds")
    assert seconds == pytest.approx({("0", "forward"): 0.03, ("0", "other"): 0.01, ("0", "collective_wait"): 0.0})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seconds=st.floats(1e-4, 1e3), interval=st.floats(1.0, 600.0))
def test_the_level_is_the_least_whose_blocks_are_as_long_as_the_interval(
    run_dir: Path, seconds: float, interval: float
) -> None:
    (run_dir / "r.0.1000.0.rank").unlink(missing_ok=True)
    rank = SimulatedRank(run_dir, 0, 1000.0)
    for _ in range(5):
        rank.spend("forward", seconds)
        rank.step()
    (found,) = RunDirectory([run_dir]).scan().ranks
    level = level_of(found.snapshot, interval)
    assert 2**level * seconds >= interval * (1 - 1e-9)
    assert level == 0 or 2 ** (level - 1) * seconds < interval * (1 + 1e-9)


def test_without_a_known_step_length_hardly_any_number_is_chosen(run_dir: Path) -> None:
    SimulatedRank(run_dir, 0, 1000.0).step()  # the first ends start-up
    (found,) = RunDirectory([run_dir]).scan().ranks
    assert next_sampled(0, level_of(found.snapshot, 30.0)) > 1000


@given(numbers=st.sets(st.integers(1, 10_000), max_size=100), level=st.integers(0, 12))
def test_the_newest_step_of_the_level_is_chosen(numbers: set[int], level: int) -> None:
    steps = [Step(number, 0.0, 1.0, ()) for number in sorted(numbers)]
    chosen = [step for step in steps if is_sampled(step.number, level)]
    assert newest_sampled(steps, level) == (chosen[-1] if chosen else None)
