"""A simulated GPU's quantities are consistent with each other."""

from __future__ import annotations

import pytest

from rankscope_exporter.simulation.gpu import RING_DEPTH, SAMPLE_PERIOD, SimulatedGpu
from rankscope_exporter.simulation.ranks import RankHistory
from rankscope_exporter.simulation.scenario import GpuModel
from rankscope_exporter.simulation.timeline import Seconds, SimulatedProcess, State, Timeline

MODEL = GpuModel(memory=1280, power_idle=100, power_max=1100)


def gpu(*states: tuple[float, State], **options: object) -> SimulatedGpu:
    return SimulatedGpu(0, MODEL, Timeline([(0.0, State()), *states]), 0.0, **options)


def test_the_ring_holds_the_last_twenty_seconds():
    ring = gpu((0.0, State(busy=0.25))).samples(100, 0)
    assert len(ring) == RING_DEPTH
    assert ring[-1][0] == pytest.approx(100)
    assert ring[0][0] == pytest.approx(80 + SAMPLE_PERIOD)
    assert {percent for _, percent in ring} == {25}


def test_a_sample_covers_the_time_since_the_previous_one():
    burst = gpu((1.0, State(busy=1)), (1.0 + SAMPLE_PERIOD / 2, State()))
    assert [percent for _, percent in burst.samples(1.5, 0.9)] == [0, 50, 0, 0]


def test_nothing_is_sampled_before_the_start():
    assert gpu().samples(0.1, -10) == []
    assert gpu().utilization(0.1) == 0


def test_power_and_energy_are_consistent():
    working = gpu((0.0, State(busy=0.5)))
    assert working.power(10) == pytest.approx((working.energy(10) - working.energy(9)) / 1)
    assert working.energy(10) == pytest.approx(10 * (100 + 1000 * 0.9 * 0.5))
    assert gpu().power(0) == 100


def test_waiting_in_a_collective_looks_busy_but_draws_little_power():
    working, waiting = gpu((0.0, State(busy=1))), gpu((0.0, State(waiting=1)))
    assert working.utilization(5) == waiting.utilization(5) == 100
    assert waiting.power(5) < working.power(5) / 2
    assert waiting.temperature(60) < working.temperature(60)


def test_utilization_is_at_most_100_percent():
    assert gpu((0.0, State(busy=0.8, waiting=0.8))).utilization(5) == 100


def test_the_temperature_follows_the_load_unless_the_scenario_sets_it():
    assert gpu().temperature(60) == 32
    assert gpu((0.0, State(busy=1))).temperature(60) > 60
    assert gpu((0.0, State(busy=1, temperature=99))).temperature(60) == 99


def test_clocks_are_lower_when_idle_or_throttled():
    busy = gpu((0.0, State(busy=1)), (5.0, State(busy=1, throttle=("hw_slowdown",))), (10.0, State()))
    assert busy.sm_clock(4) == MODEL.sm_clock
    assert busy.sm_clock(6) < MODEL.sm_clock
    assert busy.reasons(6) == {"hw_slowdown"}
    assert busy.sm_clock(20) < busy.sm_clock(6)
    assert busy.reasons(20) == {"gpu_idle"}


@pytest.mark.parametrize(
    ("own", "used"), [(None, 100 + 30), (400, 400 + 30), (10**6, MODEL.memory - 10)], ids=["summed", "set", "full"]
)
def test_used_memory_is_that_of_the_processes_unless_the_scenario_sets_its_own(own, used):
    state = State(memory_used=own, processes=(SimulatedProcess(1, 100),))
    shared = gpu((0.0, state), holders=lambda index: [SimulatedProcess(9, 30 + index)])
    assert shared.memory_used(1) == used
    assert [process.pid for process in shared.processes(1)] == [1, 9]


def test_ranks_add_their_work_pids_and_memory():
    history = RankHistory()
    history.add(1.0, Seconds(computing=0.5), (11, 12))
    followed = gpu(ranks=history)
    assert followed.seconds(1).utilized == 0.5
    assert [process.pid for process in followed.processes(1)] == [11, 12]
    assert followed.memory_used(1) == pytest.approx(0.6 * MODEL.memory, abs=2)


def test_the_ring_of_a_followed_gpu_ends_at_the_last_poll():
    history = RankHistory()
    history.add(1.0, Seconds(computing=1.0), (11,))
    ring = gpu(ranks=history).samples(5.0, 0.0)
    assert ring[-1] == (pytest.approx(1.0), 100)
