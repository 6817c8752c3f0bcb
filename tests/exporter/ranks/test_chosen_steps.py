"""The level at which steps are chosen by their number: the same on all nodes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from testing.simulated_job import SimulatedRank

from rankscope.record.sampling import next_sampled
from rankscope_exporter.ranks.chosen_steps import level_of
from rankscope_exporter.ranks.run_directory import RunDirectory


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
