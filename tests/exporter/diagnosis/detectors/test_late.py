"""Stragglers: the rank that slows down the others, its lag, its phase and the cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing.readings import Adjust, Training, Work, counting, drift, hang, spend, window

from rankscope_exporter.diagnosis.detectors import late
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.late_set import Ranks
from rankscope_exporter.diagnosis.readings import (
    CollectiveCounters,
    GpuCounters,
    GpuReading,
    ProcessCounters,
    RankReading,
)
from rankscope_exporter.diagnosis.step_times import has_spikes

SLOW = 0.09
"""Extra seconds of a slow rank's steps: 0.3 of a step."""


def found(one: Window) -> dict[Ranks, Candidate]:
    """Return the candidates for ranks that are late beyond the limit."""
    sets = late.sets(one.run, one.thresholds)
    return {ranks: candidate for ranks in sets if (candidate := late.explain(one, ranks))}


def cause(training: Training, phase: str = "backward", rank: int = 1) -> str:
    (candidate,) = found(window(training, spend(phase, SLOW, rank))).values()
    return candidate.cause


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", ["data_wait", "h2d_copy", "forward", "backward", "optimizer", "device_wait", "other"])
def test_a_slow_rank_is_named_with_its_phase_and_loss(clock, ranks, phase) -> None:
    candidates = found(window(Training(ranks, clock=clock), spend(phase, SLOW, 1)))
    assert candidates.keys() == {(1,)}
    assert candidates[1,].cause == phase
    assert candidates[1,].ratio == pytest.approx(SLOW / 0.3, abs=0.03)
    assert candidates[1,].place == Place(1, f"0-{ranks - 1}", "node-a", "1", "GPU-1", ranks=(1,), place="GPU 1")
    assert candidates[1,].evidence["excess"] == pytest.approx(candidates[1,].ratio, rel=0.1)


def test_a_rank_that_waits_for_its_data_most_of_the_time_is_the_straggler_of_two() -> None:
    """The mean of two ranks would be late data on every rank."""
    candidates = found(window(Training(2), spend("data_wait", 0.3, 1)))
    assert candidates.keys() == {(1,)}
    assert candidates[1,].cause == "data_wait"
    assert candidates[1,].ratio == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_healthy_ranks_have_no_straggler(ranks) -> None:
    assert not found(window(Training(ranks), drift))


def test_a_rank_alone_has_no_lag() -> None:
    assert late.measure(window(Training(1), spend("data_wait", 0.3))) == {}


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
@pytest.mark.parametrize("every", [1, 50])
def test_a_rank_that_is_alone_in_a_planned_phase_is_not_a_straggler(phase, every) -> None:
    assert not found(window(Training(4), spend(phase, 1.0, 0, every=every)))


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_planned_phases_do_not_hide_a_straggler_and_are_not_its_cause(phase) -> None:
    both = spend(phase, 1.0, 0, every=20), spend("forward", SLOW, 2)
    candidates = found(window(Training(4), *both))
    assert {rank: one.cause for rank, one in candidates.items()} == {(2,): "forward"}
    assert candidates[2,].ratio == pytest.approx(SLOW / 0.3, abs=0.03)


def test_ranks_that_are_late_in_turn_are_not_stragglers() -> None:
    def in_turn(step: int, rank: int, work: Work) -> None:
        work["forward"] += 0.1 if step % 4 == rank else 0.0

    one = window(Training(4), in_turn)
    assert not found(one)
    assert late.explain_in_turn(one, ())


@pytest.mark.parametrize(("every", "named"), [(1, (5, 6)), (200, ())], ids=["in each step", "in two of 400 steps"])
def test_ranks_take_turns_only_if_they_are_last_in_many_steps(every: int, named: Ranks) -> None:
    """The others wait for the last one to end a rollout: in the second case, once for each of two ranks."""

    def rollout(step: int, rank: int, work: Work) -> None:
        if (step - every // 2) % every == 0:
            work["other"] = every * (0.15 if rank == (5, 6)[step // every % 2] else 0.1)

    candidate = late.explain_in_turn(window(Training(8), rollout, seconds=160.0), ())
    assert candidate
    assert candidate.place.ranks == named


def test_a_phase_that_the_script_defines_is_a_cause() -> None:
    """The step rings do not have its seconds."""

    def renamed(reading: RankReading) -> RankReading:
        phases, aligned = dict(reading.counters.phases), reading.counters.aligned
        phases["tokenize"] = phases.pop("other", 0.0)
        return counting(reading, phases=phases, aligned=replace(aligned, phases={**aligned.phases, "other": 0.0}))

    training = Training(adjust=renamed)
    assert cause(training, "other") == "tokenize"


def test_a_lag_that_no_phase_explains_has_an_unknown_cause() -> None:
    def everywhere(_step: int, rank: int, work: Work) -> None:
        for phase in ("forward", "backward", "optimizer", "data_wait"):
            work[phase] += SLOW / 4 if rank == 1 else 0.0

    (candidate,) = found(window(Training(4), everywhere)).values()
    assert candidate.cause == "unknown"


def adjusted(rank: int, change: Adjust) -> Training:
    """Return a training in which the readings of one rank are changed."""
    return Training(adjust=lambda reading: change(reading) if reading.rank == rank else reading)


def throttled(reading: RankReading) -> RankReading:
    return counting(reading, gpu=GpuCounters(reading.at, {"power": 0.9 * reading.at}, 0.7 * reading.at))


def foreign(reading: RankReading) -> RankReading:
    return replace(reading, gpu=GpuReading(str(reading.rank), 0.6, 2, 0.0))


def contended(reading: RankReading) -> RankReading:
    return counting(reading, process=ProcessCounters(run_queue=0.3 * reading.at))


def full(reading: RankReading) -> RankReading:
    return counting(
        replace(reading, gpu=GpuReading("0", 0.8, 1, 0.0)), gpu=GpuCounters(1.05 * reading.at, {}, reading.at)
    )


REASONS = {throttled: "throttled", foreign: "foreign_process"}


@pytest.mark.parametrize("change", REASONS)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "device_wait"])
def test_slow_computation_has_the_external_reason_as_cause(change, phase) -> None:
    assert cause(adjusted(1, change), phase) == REASONS[change]


@pytest.mark.parametrize("change", [*REASONS, contended])
@pytest.mark.parametrize("phase", ["data_wait", "h2d_copy", "other"])
def test_reasons_for_slow_computation_do_not_explain_other_phases(change, phase) -> None:
    assert cause(adjusted(1, change), phase) == phase


@pytest.mark.parametrize("change", [*REASONS, contended])
def test_a_problem_of_another_rank_is_not_the_reason(change) -> None:
    assert cause(adjusted(2, change)) == "backward"


def test_cpu_contention_is_the_cause_if_the_other_ranks_have_none() -> None:
    all_ranks = Training(adjust=contended)
    one = Training(adjust=lambda reading: contended(reading) if reading.rank == 1 else counting(reading, process=QUIET))
    assert cause(one) == "cpu_contention"
    assert cause(all_ranks) == "backward"


QUIET = ProcessCounters(run_queue=0.0)


def test_a_gpu_that_is_throttled_like_its_peers_is_not_the_reason() -> None:
    training = Training(adjust=throttled)
    assert cause(training) == "backward"


def test_a_gpu_that_is_throttled_to_a_lower_clock_than_its_peers_is_the_reason() -> None:
    def lower(reading: RankReading) -> RankReading:
        ratio = 0.6 if reading.rank == 1 else 0.9
        return counting(reading, gpu=GpuCounters(reading.at, {"power": reading.at}, ratio * reading.at))

    training = Training(adjust=lower)
    assert cause(training) == "throttled"


def test_ranks_that_share_a_gpu_are_not_foreign_processes() -> None:
    training = Training(2, adjust=lambda reading: replace(reading, uuid="GPU-0", gpu=GpuReading("0", 0.6, 2, 0.0)))
    assert cause(training) == "backward"


@pytest.mark.parametrize("uuids", [("GPU-0", "GPU-0", "GPU-0"), ("GPU-0", "GPU-1", "GPU-2")])
def test_processes_that_are_on_the_gpus_of_all_peers_are_not_the_reason(uuids) -> None:
    """Another run on the same GPU, or a server on each GPU, such as that of MPS."""
    sharing = [uuids.count(uuid) + 2 for uuid in uuids]
    training = Training(
        3,
        adjust=lambda reading: replace(
            reading, uuid=uuids[reading.rank], gpu=GpuReading("0", 0.6, sharing[reading.rank], 0.0)
        ),
    )
    assert cause(training) == "backward"


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0,), (3,)])
def test_steps_that_a_planned_phase_made_long_are_no_spikes(phase, ranks) -> None:
    planned = [spend(phase, 1.4, rank, every=10) for rank in ranks]
    one = window(Training(), *planned, seconds=60.0)
    assert not has_spikes(one.run)


def test_a_planned_phase_in_some_of_steps_of_minutes_makes_no_spikes_of_the_others() -> None:
    """Their lengths are known by few bounds: 300 s is one of them."""
    lengths = lambda step, _, work: work.update(forward=220.0 if step % 2 else 330.0)  # noqa: E731
    one = window(Training(2), lengths, spend("evaluation", 40.0, 1, every=3), seconds=4600.0)
    assert not has_spikes(one.run)


def test_long_steps_are_spikes_if_planned_phases_do_not_explain_them() -> None:
    planned = [spend("checkpoint", 1.4, rank, every=50) for rank in range(4)]
    one = window(Training(), *planned, spend("forward", 1.4, 1, every=10), seconds=120.0)
    assert has_spikes(one.run)


def sends_more(reading: RankReading) -> RankReading:
    return counting(reading, collectives=CollectiveCounters({"gather": 1.0}, {"gather": 1e9 * reading.counters.steps}))


@pytest.mark.parametrize("phase", ["other", "backward"])
def test_rank_0_that_sends_more_in_collectives_than_rank_1_aggregates(phase) -> None:
    assert cause(adjusted(0, sends_more), phase, rank=0) == "aggregation"
    assert cause(adjusted(0, sends_more), "data_wait", rank=0) == "data_wait"
    assert cause(adjusted(2, sends_more), phase, rank=2) == phase


@pytest.mark.parametrize(
    ("received", "waited", "expected"), [(1e9, SLOW, "aggregation"), (1e3, SLOW, "other"), (1e9, 0.01, "other")]
)
def test_rank_0_of_two_aggregates_if_the_other_one_waits_for_its_result(received, waited, expected) -> None:
    def exchange(reading: RankReading) -> RankReading:
        steps, is_first = reading.counters.steps, reading.rank == 0
        by_op = {"ddp_all_reduce": 1e9 * steps, "recv": received * steps, "send": received * steps}
        seconds = {"recv": (0.0 if is_first else waited) * steps}
        return counting(reading, collectives=CollectiveCounters(dict.fromkeys(by_op, steps), by_op, seconds))

    assert cause(Training(2, adjust=exchange), "other", rank=0) == expected


@pytest.mark.parametrize("change", ["sends_more", "full"])
def test_a_rank_0_that_does_no_more_than_its_stage_does_not_aggregate(change) -> None:
    """Ranks 0 and 2 are the first stage, which also has the embedding."""

    def staged(reading: RankReading) -> RankReading:
        own = {"sends_more": sends_more, "full": full}[change](reading) if reading.rank in (0, 2) else reading
        return replace(own, stage=reading.rank % 2)

    assert cause(Training(4, adjust=staged), "backward", rank=0) == "backward"


def test_rank_0_whose_gpu_is_busier_and_fuller_aggregates_without_a_foreign_process() -> None:
    assert cause(adjusted(0, full), "other", rank=0) == "aggregation"
    assert cause(adjusted(0, lambda reading: foreign(full(reading))), rank=0) == "foreign_process"


def exchanging(*ratios: float) -> Adjust:
    """Return ranks that send these relative amounts in all_to_all."""

    def change(reading: RankReading) -> RankReading:
        steps = reading.counters.steps
        bytes_by_op = {"all_to_all": 1e8 * ratios[reading.rank] * steps, "all_reduce": 1e8 * steps}
        return counting(reading, collectives=CollectiveCounters(dict.fromkeys(bytes_by_op, 4 * steps), bytes_by_op))

    return change


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_with_more_routed_tokens_has_expert_imbalance(rank) -> None:
    hot = exchanging(*(1.6 if other == rank else 1.0 for other in range(4)))
    training = Training(adjust=hot)
    found_now = late.explain(window(training, spend("backward", SLOW, rank)), (rank,))
    assert found_now
    assert found_now.cause == "expert_imbalance"
    assert found_now.evidence["exchanged_bytes"] > 0.0


@pytest.mark.parametrize("ratios", [(1.0, 1.05, 1.0, 1.0), (1.6, 1.0, 1.6, 1.6), (0.0, 0.0, 0.0, 0.0)])
def test_a_slow_rank_that_exchanges_at_most_as_much_as_its_peers_has_no_expert_imbalance(ratios) -> None:
    training = Training(adjust=exchanging(*ratios))
    assert cause(training) == "backward"


def test_late_data_of_one_rank_is_not_a_straggler_if_all_loaders_are_as_slow() -> None:
    def loading(busy: float) -> Adjust:
        return lambda one: counting(one, loader_working=busy * one.at, loader_idle=(1 - busy) * one.at)

    training = Training(adjust=loading(0.95))
    assert not found(window(training, spend("data_wait", SLOW, 1)))
    training = Training(adjust=loading(0.3))
    assert cause(training, "data_wait") == "data_wait"


def test_a_run_that_makes_no_steps_has_no_lag() -> None:
    assert not found(window(Training(4), hang("backward", 1)))


def test_ranks_are_compared_within_their_group_only() -> None:
    """No rank waits for the replica that has twice the work of the other."""

    def grouped(reading: RankReading) -> RankReading:
        group = "0-1" if reading.rank < 2 else "2-3"
        return replace(counting(reading, aligned=replace(reading.counters.aligned, seconds=0.0)), group=group)

    training = Training(adjust=grouped)
    assert not found(window(training, spend("backward", SLOW, 2, 3)))
    training = Training(adjust=grouped)
    assert found(window(training, spend("backward", SLOW, 3))).keys() == {(3,)}


POWER_LIMITED = [((0.73, 0.73), "backward"), ((0.6, None), "throttled")]
"""The clocks of rank 1 and of the others while they compute, as a ratio; None if their power suffices."""


@pytest.mark.parametrize(("clocks", "expected"), POWER_LIMITED)
@pytest.mark.parametrize("part", [0.7, 1.0])
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.3])
def test_more_work_at_the_default_power_limit_is_not_throttling(clocks, expected, seconds, part) -> None:
    """A GPU needs less power while it waits, and in a part of its work."""

    def limited(one: RankReading) -> RankReading:
        clock = clocks[0] if one.rank == 1 else clocks[1]
        limited = part * one.counters.phases.get("backward", 0.0)
        others = sum(one.counters.phases.values()) - limited
        throttled = {} if clock is None else {"sw_power_cap": limited}
        return counting(one, gpu=GpuCounters(0.95 * one.at, throttled, (clock or 0.95) * limited + 0.95 * others))

    found = late.explain(window(Training(adjust=limited), spend("backward", seconds, 1)), (1,))
    assert found
    assert found.cause == expected
