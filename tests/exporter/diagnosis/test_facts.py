"""Facts: the ranks' time between two readings, how ranks compare, and their lost GPU time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.readings import RUN, Training, counting, spend, window

from rankscope.record import phases
from rankscope_exporter.diagnosis.facts import Stall, compare, lower_median
from rankscope_exporter.diagnosis.lost import lost
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    Counters,
    Ending,
    GpuCounters,
    GpuReading,
    ProcessCounters,
    RankReading,
    spent,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

LIMITS = Thresholds()


def test_spent_counters_are_differences() -> None:
    then = Counters(3.0, {"forward": 1.0}, step_buckets=(1.0, 2.0), gpu=GpuCounters(5.0, {"power": 1.0}))
    now = Counters(5.0, {"forward": 1.5, "other": 2.0}, step_buckets=(1.0, 4.0), gpu=GpuCounters(9.0, {"power": 3.0}))
    found = spent(now, then)
    assert (found.steps, found.phases, found.step_buckets) == (2.0, {"forward": 0.5, "other": 2.0}, (0.0, 2.0))
    assert (found.gpu.busy, found.gpu.throttled) == (4.0, {"power": 2.0})


def test_a_counter_that_decreases_counts_from_0() -> None:
    found = spent(Counters(2.0, {"forward": 0.5}, aligned=AlignedCounters(1.0)), Counters(9.0, {"forward": 3.0}))
    assert (found.steps, found.phases, found.aligned.steps) == (2.0, {"forward": 0.5}, 1.0)


@pytest.mark.parametrize(("now", "then"), [(None, 3.0), (3.0, None), (None, None)])
def test_a_counter_that_is_unknown_at_either_time_is_unknown(now, then) -> None:
    found = spent(
        Counters(loader_working=now, process=ProcessCounters(now), gpu=GpuCounters(now)),
        Counters(loader_working=then, process=ProcessCounters(then), gpu=GpuCounters(then)),
    )
    assert (found.loader_working, found.process.cpu, found.gpu.busy) == (None, None, None)


def test_a_restarted_rank_is_not_compared_with_its_previous_process() -> None:
    training = Training(2)
    *_, (_, then) = training.train(60)
    training.restart()
    *_, (_, now) = training.train(20)
    facts = compare(RUN, then, now)
    assert [one.seconds for one in facts.ranks] == pytest.approx([20.0, 20.0])


def after(rank: int, at: float, stalled: float, compared: float) -> RankReading:
    """Return a reading after 100 s of which the device has measured 10, and a stall of rank 0."""
    stall, on_device = ("device_wait", "collective_wait") if rank else ("other", "other")
    aligned = AlignedCounters(
        50.0, 10.0 + compared, skew=rank * compared, phases={"forward": 10.0, on_device: compared}
    )
    counters = Counters(phases={"forward": 101.0, stall: stalled}, device_steps=50.0, aligned=aligned)
    return RankReading(rank, at, 0.0, "0-1", counters=counters)


@pytest.mark.parametrize("compared", [0.0, 17.0, 20.0])
def test_a_stall_counts_as_much_as_the_other_time_whether_its_step_is_compared_or_not(compared: float) -> None:
    then, now = (
        {rank: after(rank, at, stalled, of_it) for rank in (0, 1)}
        for at, stalled, of_it in ((101.0, 0.0, 0.0), (121.0, 20.0, compared))
    )
    late, other = compare(RUN, then, now, [Stall(121.0, 20.0, (0,), "other")]).ranks
    weight = (10.0 + compared) / 121.0 * (compared or 20.0)
    for one, phase in ((late, "other"), (other, "collective_wait")):
        assert one.spent.aligned.seconds == pytest.approx(weight)
        assert one.step_ratios[phase] == pytest.approx(1.0)
    assert (late.lag, other.lag) == pytest.approx((1.0, 0.0))


def test_a_stall_is_no_more_of_a_window_without_compared_steps_than_of_its_time() -> None:
    """Steps of ten minutes may each have a planned phase."""
    then, now = (
        {rank: after(rank, at, stalled, 0.0) for rank in (0, 1)} for at, stalled in ((101.0, 0.0), (701.0, 20.0))
    )
    for reading in now.values():
        reading.counters.phases["forward"] += 580.0  # type: ignore[index]
    late, other = compare(RUN, then, now, [Stall(701.0, 20.0, (0,), "other")]).ranks
    assert (late.wait, other.wait) == pytest.approx((0.0, 20.0 / 600.0))


@pytest.mark.parametrize(("planned", "waited"), [(5.0, 15.0), (25.0, 0.0)])
def test_a_rank_that_is_late_after_a_planned_phase_of_its_own_has_no_stall(planned: float, waited: float) -> None:
    then, now = ({rank: after(rank, at, late, 0.0) for rank in (0, 1)} for at, late in ((101.0, 0.0), (141.0, 20.0)))
    now[0].counters.phases["evaluation"] = planned  # type: ignore[index]
    _, other = compare(RUN, then, now, [Stall(141.0, 20.0, (0,), "other")]).ranks
    assert other.spent.aligned.skew == pytest.approx(waited * 10.0 / 121.0)
    assert (other.lag is None) is not bool(waited)


def test_ranks_without_an_earlier_reading_and_ended_ranks_are_not_compared() -> None:
    training = Training(3)
    *_, (_, then) = training.train(60)
    *_, (_, now) = training.train(20)
    now = {**now, 2: replace(now[2], ended=Ending("finished", 70.0))}
    facts = compare(RUN, {0: then[0], 2: then[2]}, now)
    assert [one.rank for one in facts.ranks] == [0]
    assert [reading.rank for reading in facts.ended] == [2]


@pytest.mark.parametrize(
    ("values", "median"),
    [
        ([4.0], 4.0),
        ([4.0, 1.0], 1.0),
        ([4.0, 1.0, 3.0], 1.0),
        ([4.0, 1.0, 3.0, 2.0], 2.0),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 3.0),
    ],
)
def test_the_lower_median_of_few_values_is_the_least(values, median) -> None:
    assert lower_median(values) == median


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_lag_is_the_time_that_the_others_would_save(ranks) -> None:
    run = window(Training(ranks), spend("forward", 0.07, 1)).run
    lags = [one.lag or 0.0 for one in run.ranks]
    assert lags[1] == pytest.approx(0.07 / 0.28, abs=0.02)
    assert [lag for rank, lag in enumerate(lags) if rank != 1] == pytest.approx([0.0] * (ranks - 1), abs=0.01)


def test_ranks_are_compared_on_the_device_clock_only_if_all_are_measured_on_it() -> None:
    def partly(reading: RankReading) -> RankReading:
        return counting(reading, device_steps=0.0, device_phases={}) if reading.rank == 2 else reading

    training = Training(4, clock="device")
    assert {one.clock for one in window(training).run.ranks} == {"device"}
    training.adjust = partly
    assert {one.clock for one in window(training).run.ranks} == {"host"}


@pytest.mark.parametrize("clock", ["host", "device"])
def test_the_ratios_of_a_rank_sum_to_one_on_both_clocks(clock) -> None:
    run = window(Training(3, clock=clock), spend("checkpoint", 1.0, 0, every=30), spend("other", 0.1, 2)).run
    for one in run.ranks:
        assert sum(one.ratios.values()) == pytest.approx(1.0)
        assert sum(one.step_ratios.values()) == pytest.approx(1.0, abs=0.02)


def test_waits_for_a_rank_in_a_planned_phase_are_compared_only_in_aligned_steps() -> None:
    training = Training(3, adjust=lambda one: counting(one, aligned=AlignedCounters()))
    assert all(one.lag is not None for one in window(training).run.ranks)
    assert all(one.lag is None for one in window(training, spend("evaluation", 1.0, 0, every=20)).run.ranks)


def test_lost_time_has_its_causes() -> None:
    found = window(Training(4), spend("checkpoint", 1.0, every=20), spend("data_wait", 0.1, 1)).lost
    step = 20 * 0.31 + 1.0
    assert found["checkpoint"] == pytest.approx(1.0 / step, abs=0.02)
    assert found["transfer"] == pytest.approx(20 * 0.01 / step, abs=0.01)
    assert found["straggler"] == pytest.approx(20 * 0.1 * 0.75 / step, abs=0.02)
    assert found["data"] == pytest.approx(20 * (0.1 * 0.25 + 0.005) / step, abs=0.02)


def test_gpus_of_ended_ranks_are_idle_while_others_are_alive() -> None:
    training = Training(4)
    *_, (_, then) = training.train(60)
    *_, (_, now) = training.train(20)
    now = {**now, 3: replace(now[3], ended=Ending("finished", 60.0))}
    found = lost(compare(RUN, then, now), LIMITS)
    assert found["idle"] == pytest.approx(0.25)
    assert sum(found.values()) == pytest.approx(1.0)
    assert lost(compare(RUN, then, now), LIMITS, is_stuck=True) == {"idle": 0.25, "stall": 0.75}


def test_a_run_without_a_living_rank_has_no_losses() -> None:
    assert lost(compare(RUN, {}, {}), LIMITS) == {}


SECONDS = st.floats(0.0, 1e6)
NAMES = st.sampled_from([*phases.NAMES, "tokenize", "none", "idle"])
PHASES = st.dictionaries(NAMES, SECONDS, max_size=5)
ALIGNED = st.builds(AlignedCounters, SECONDS, SECONDS, SECONDS, SECONDS, PHASES, PHASES)
GPU = st.builds(GpuCounters, st.none() | SECONDS, st.none() | PHASES, st.none() | SECONDS)
PROCESS = st.builds(ProcessCounters, *[st.none() | SECONDS] * 5)
COUNTERS = st.builds(
    Counters, steps=SECONDS, phases=PHASES, device_steps=SECONDS, device_phases=PHASES, device_dry=PHASES,
    device_waits=SECONDS, aligned=ALIGNED, process=PROCESS, gpu=GPU, loader_working=st.none() | SECONDS,
)  # fmt: skip
READINGS = st.builds(
    RankReading, st.integers(0, 3), st.just(100.0), st.sampled_from([0.0, 50.0]), st.sampled_from(["0-1", "2-3"]),
    ended=st.none() | st.just(Ending("killed", 90.0)), children=st.none() | st.integers(0, 8),
    gpu=st.none() | st.just(GpuReading("0")), counters=COUNTERS,
)  # fmt: skip
MOMENTS = st.dictionaries(st.integers(0, 3), READINGS)


@given(MOMENTS, MOMENTS, st.booleans())
def test_the_causes_of_lost_time_sum_to_one_for_any_readings(
    then: Mapping[int, RankReading], now: Mapping[int, RankReading], is_stuck: bool
) -> None:
    then, now = ({rank: replace(one, rank=rank) for rank, one in moment.items()} for moment in (then, now))
    facts = compare(RUN, then, now)
    found = lost(facts, LIMITS, is_stuck=is_stuck)
    assert all(0.0 <= ratio <= 1.0 + 1e-9 for ratio in found.values())
    assert sum(found.values()) == pytest.approx(1.0 if facts.ranks else 0.0)
