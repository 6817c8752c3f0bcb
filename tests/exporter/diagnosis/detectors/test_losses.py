"""Losses of a whole run: late data, transfer, uneven work, copies, launches, device reads, throttling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from testing.readings import Adjust, Training, Work, counting, drift, spend, window

from rankscope_exporter.diagnosis.detectors import data, gpu_time, late, network, small_collectives
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.ports import PortFault
from rankscope_exporter.diagnosis.readings import (
    CollectiveCounters,
    Counters,
    GpuCounters,
    GpuReading,
    ProcessCounters,
    RankReading,
)

COPIES, LAUNCH, DEVICE_READS, THROTTLING = gpu_time.DETECTORS
DETECTORS = (
    *data.DETECTORS,
    *network.DETECTORS,
    late.DETECTORS[1],
    *small_collectives.DETECTORS,
    *gpu_time.DETECTORS,
)


def loss(detector: LossDetector, one: Window) -> float:
    """Return the run's loss beyond the allowance."""
    allowance = detector.allowance(one) if detector.allowance else 0.0
    return (detector.measure(one) or 0.0) - allowance


def found(one: Window) -> dict[str, Candidate]:
    """Return the candidates for losses beyond the limit, by kind."""
    lost = [detector for detector in DETECTORS if loss(detector, one) > one.thresholds.loss]
    return {detector.kind: candidate for detector in lost if (candidate := detector.explain(one, ()))}


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_healthy_run_loses_nothing(ranks, clock) -> None:
    assert not found(window(Training(ranks, clock=clock), drift))


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_late_data_on_every_rank_is_a_data_loss(ranks, clock) -> None:
    candidates = found(window(Training(ranks, clock=clock), spend("data_wait", 0.09)))
    assert candidates.keys() == {"data"}
    assert candidates["data"].ratio == pytest.approx(0.095 / 0.3, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_late_data_on_one_rank_is_not_a_data_loss(ranks) -> None:
    """The slow one of two ranks waits 60% of the time for its data, the other 0%."""
    assert "data" not in found(window(Training(ranks), spend("data_wait", 0.3, 1)))


def test_late_data_on_most_ranks_is_a_data_loss() -> None:
    assert found(window(Training(8), spend("data_wait", 0.09, *range(1, 7)))).keys() >= {"data"}
    assert "data" not in found(window(Training(3), spend("data_wait", 0.09, 1, 2))), (
        "with three ranks, all have to be late"
    )


def by_cpu(ratio: float) -> Adjust:
    return lambda one: replace(
        counting(one, process=ProcessCounters(workers_cpu=4 * ratio * one.at, workers_run_queue=0.0)), children=4
    )


@pytest.mark.parametrize(("busy", "cause"), [(0.9, "cpu"), (0.1, "io"), (0.35, "unknown")])
def test_the_cause_of_late_data_is_what_the_loader_workers_do(busy, cause) -> None:
    candidate = found(window(Training(adjust=by_cpu(busy)), spend("data_wait", 0.09)))["data"]
    assert candidate.cause == cause
    assert candidate.evidence["workers_computing"] == pytest.approx(busy)


def test_without_loader_workers_the_cause_of_late_data_is_unknown() -> None:
    assert found(window(Training(4), spend("data_wait", 0.09)))["data"].cause == "unknown"


def in_turn(phase: str, seconds: float = 0.1) -> Callable[[int, int, Work], None]:
    def change(step: int, rank: int, work: Work) -> None:
        work[phase] = work.get(phase, 0.0) + (seconds if step % 4 == rank else 0.0)

    return change


def test_data_that_is_late_on_ranks_in_turn_is_a_data_loss_if_all_loaders_are_busy() -> None:
    busy = Training(adjust=lambda one: counting(one, loader_working=0.97 * one.at, loader_idle=0.03 * one.at))
    assert found(window(busy, in_turn("data_wait"))).keys() == {"data"}
    idle = Training(adjust=lambda one: counting(one, loader_working=0.3 * one.at, loader_idle=0.7 * one.at))
    assert found(window(idle, in_turn("data_wait"))).keys() == {"rotating_straggler"}


@pytest.mark.parametrize("ranks", [4, 8])
def test_late_data_in_turn_that_is_too_little_on_each_rank_is_a_rotating_straggler(ranks) -> None:
    def late_data(step: int, rank: int, work: Work) -> None:
        work["data_wait"] += 0.025 * ranks if step % ranks == rank else 0.0

    assert found(window(Training(ranks), late_data)).keys() == {"rotating_straggler"}


def test_late_data_of_a_straggler_is_not_a_data_loss_while_all_loaders_are_busy() -> None:
    busy = Training(adjust=lambda one: counting(one, loader_working=0.83 * one.at, loader_idle=0.17 * one.at))
    one = window(busy, spend("data_wait", 0.1, 1))
    assert late.explain(one, (1,))
    assert not found(one)


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_slow_network_is_found_without_naming_a_rank(ranks, clock) -> None:
    candidates = found(window(Training(ranks, clock=clock, transfer=0.2)))
    assert candidates.keys() == {"network"}
    assert candidates["network"].cause == "network"
    assert candidates["network"].ratio == pytest.approx(0.5, abs=0.03)
    assert candidates["network"].place.rank is None


def test_a_quarter_of_the_time_in_transfer_is_not_a_loss() -> None:
    assert not found(window(Training(4, transfer=0.07)))


def test_a_run_of_one_rank_has_no_network_loss() -> None:
    assert network.measure(window(Training(1, transfer=0.2))) is None


def test_a_reduced_link_is_the_cause_with_its_rank() -> None:
    def reduced(one: RankReading) -> RankReading:
        return replace(one, gpu=GpuReading(str(one.rank), 0.6, 1, 0.0, is_link_reduced=one.rank == 2))

    candidate = found(window(Training(adjust=reduced, transfer=0.2)))["network"]
    assert (candidate.cause, candidate.place.rank, candidate.place.gpu) == ("link", 2, "2")


def test_a_faulty_port_is_the_cause_with_its_node() -> None:
    def faulty(one: RankReading) -> RankReading:
        return replace(one, node="node-a", port_fault=PortFault("mlx5_3", "rate", 0.5))

    candidate = found(window(Training(adjust=faulty, transfer=0.2)))["network"]
    assert candidate.cause == "link"
    assert candidate.place == Place(node="node-a", port="mlx5_3")
    assert candidate.evidence["port_rate"] == 0.5


@pytest.mark.parametrize(
    ("transfer", "excess", "causes"),
    [(0.2, 0.2, ["link"]), (0.2, 0.02, ["network"]), (0.07, 0.2, ["link"]), (0.07, 0.02, [])],
)
def test_a_group_that_waits_longer_than_its_peers_has_a_slow_link(
    transfer: float, excess: float, causes: list[str]
) -> None:
    def paired(one: RankReading) -> RankReading:
        pair = "0-1" if one.rank < 2 else "2-3"
        waits = {pair: sum(one.counters.phases.values()) * (0.3 + excess * (pair == "2-3"))}
        return counting(one, collectives=replace(one.counters.collectives, group_waits=waits))

    candidates = found(window(Training(adjust=paired, transfer=transfer)))
    assert [one.cause for one in candidates.values()] == causes
    assert all(one.place == Place(group="2-3") for one in candidates.values() if one.cause == "link")


def test_transfer_of_ranks_whose_steps_are_not_compared_has_an_unknown_cause() -> None:
    training = Training(adjust=lambda one: counting(one, aligned=Counters().aligned), transfer=0.2)
    assert found(window(training))["network"].cause == "unknown"


def many(calls: float, size: float, seconds: float = 0.2) -> Adjust:
    """Return ranks with this number of collectives per step."""

    def change(one: RankReading) -> RankReading:
        steps = one.counters.steps
        gradients, more = {"ddp_all_reduce": steps}, {"all_reduce": calls * steps}
        moved = {"ddp_all_reduce": 4e4 * steps, "all_reduce": calls * size * steps}
        waited = {"all_reduce": seconds * steps}
        return counting(one, collectives=CollectiveCounters(gradients | more, moved, waited))

    return change


@pytest.mark.parametrize("clock", ["host", "device"])
def test_many_small_collectives_are_not_counted_as_network(clock) -> None:
    candidates = found(window(Training(adjust=many(20, 8.0), transfer=0.2, clock=clock)))
    assert candidates.keys() == {"small_collectives"}
    assert candidates["small_collectives"].evidence["collectives_per_step"] == pytest.approx(20.0)
    assert candidates["small_collectives"].ratio == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("calls", "size"), [(2, 8.0), (20, 1e6)], ids=["few", "large"])
def test_few_or_large_collectives_are_counted_as_network(calls, size) -> None:
    assert found(window(Training(adjust=many(calls, size), transfer=0.2))).keys() == {"network"}


def test_small_collectives_on_the_device_are_not_the_cause_if_many_bytes_are_moved() -> None:
    def moving(one: RankReading) -> RankReading:
        counted = many(20, 8.0)(one)
        steps = one.counters.steps
        return counting(
            counted, collectives=replace(counted.counters.collectives, bytes={"ddp_all_reduce": 1e10 * steps})
        )

    assert found(window(Training(adjust=moving, transfer=0.2, clock="device"))).keys() == {"network"}


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("sends", [8, 64])
def test_sends_and_receives_of_a_pipeline_are_no_small_collectives(clock, sends) -> None:
    """The gradients of four parameters are averaged one by one."""

    def sending(one: RankReading) -> RankReading:
        steps = one.counters.steps
        calls = {"send": sends * steps, "recv": sends * steps, "all_reduce": 4.0 * steps}
        moved = {"send": sends * 4e3 * steps, "recv": sends * 4e3 * steps, "all_reduce": 4e3 * steps}
        waited = {"recv": 0.07 * steps, "all_reduce": 0.005 * steps}
        return counting(one, collectives=CollectiveCounters(calls, moved, waited))

    assert not found(window(Training(adjust=sending, transfer=0.075, clock=clock)))


def test_small_collectives_that_the_layout_needs_are_named() -> None:
    def parallel(one: RankReading) -> RankReading:
        return replace(many(20, 8.0)(one), parallelism=("tp",))

    assert found(window(Training(adjust=parallel, transfer=0.2)))["small_collectives"].cause == "parallelism"
    assert found(window(Training(adjust=many(20, 8.0), transfer=0.2)))["small_collectives"].cause == ""


@pytest.mark.parametrize("late", [0.02, 0.1])
def test_small_collectives_are_no_finding_while_a_rank_is_late(late) -> None:
    candidates = found(window(Training(adjust=many(20, 8.0), transfer=0.2), spend("backward", late, 1)))
    assert ("small_collectives" in candidates) == (late < 0.1)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_are_late_in_computing_in_turn_have_uneven_work(ranks) -> None:
    """A step takes 0.21 s, and 0.15 s longer for the late rank: they cost as much as one that is always late."""

    def uneven(step: int, rank: int, work: Work) -> None:
        work["backward"] += 0.15 if step % ranks == rank else 0.0

    candidate = found(window(Training(ranks), uneven))["rotating_straggler"]
    assert candidate.cause == "uneven_work"
    assert candidate.ratio == pytest.approx(0.15 / 0.36, abs=0.02)


@pytest.mark.parametrize("phase", ["data_wait", "other", "h2d_copy"])
def test_ranks_that_are_late_in_turn_in_another_phase_have_it_as_the_cause(phase) -> None:
    assert found(window(Training(4), in_turn(phase)))["rotating_straggler"].cause == phase


def test_garbage_collection_in_turn_is_the_cause_of_late_ranks() -> None:
    collecting = Training(adjust=lambda one: counting(one, gc_seconds=0.08 * one.at))
    assert found(window(collecting, in_turn("backward")))["rotating_straggler"].cause == "gc"


def test_a_few_far_longer_steps_in_turn_are_spikes() -> None:
    def spikes(step: int, rank: int, work: Work) -> None:
        work["other"] = 2.0 if step % 20 == 0 and step // 20 % 4 == rank else 0.0

    assert found(window(Training(4), spikes, seconds=120.0))["rotating_straggler"].cause == "spikes"


def test_one_straggler_is_not_a_rotating_straggler() -> None:
    assert "rotating_straggler" not in found(window(Training(4), spend("backward", 0.1, 1)))


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_waiting_for_ranks_in_a_planned_phase_is_not_a_rotating_straggler(phase) -> None:
    def planned(step: int, rank: int, work: Work) -> None:
        work[phase] = 1.0 if step % 20 == 0 and step // 20 % 4 == rank else 0.0

    assert not found(window(Training(4), planned, seconds=60.0))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_copies_are_a_loss_if_every_rank_waits_for_them(ranks) -> None:
    candidate = found(window(Training(ranks), spend("h2d_copy", 0.09)))["copies"]
    assert candidate.ratio == pytest.approx(0.09 / 0.3, abs=0.02)
    if ranks > 1:
        assert "copies" not in found(window(Training(ranks), spend("h2d_copy", 0.3, 1)))


def dry(seconds: Mapping[str, float], waits: float, host_wait: float) -> Adjust:
    """Return ranks whose devices are dry, and idle, for these seconds in each step, by phase."""

    def change(one: RankReading) -> RankReading:
        steps, phases = one.counters.steps, dict(one.counters.phases)
        waited = min(host_wait * steps, phases["backward"]) if "backward" in phases else 0.0
        phases = phases | {"backward": phases.get("backward", 0.0) - waited, "device_wait": waited}
        device_dry = {phase: spent * steps for phase, spent in seconds.items()}
        gpu = replace(one.counters.gpu, busy=(1.0 - sum(seconds.values()) / 0.21) * sum(phases.values()))
        return counting(one, device_dry=device_dry, device_waits=waits * steps, phases=phases, gpu=gpu)

    return change


def test_time_of_gpus_that_wait_for_launches_is_lost() -> None:
    launching = Training(adjust=dry({"forward": 0.03, "backward": 0.03}, 0.0, 0.0), clock="device")
    candidates = found(window(launching))
    assert candidates.keys() == {"launch"}
    assert candidates["launch"].ratio == pytest.approx(0.06 / 0.21, abs=0.03)


def test_time_of_gpus_that_wait_after_a_read_in_every_step_is_lost_to_reads() -> None:
    reading = Training(adjust=dry({"forward": 0.03, "backward": 0.03}, 1.0, 0.1), clock="device")
    candidates = found(window(reading))
    assert candidates.keys() == {"device_reads"}
    assert candidates["device_reads"].evidence["device_waits_per_step"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("late", ["data_wait", "h2d_copy"])
def test_gpus_that_compute_while_they_keep_up_with_their_host_do_not_wait_for_launches(late) -> None:
    """A GPU that a wait has left without work is dry to the end of each phase, although it computes most of it."""

    def computing(one: RankReading) -> RankReading:
        counters, steps = one.counters, one.counters.steps
        computed = sum(counters.device_phases.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
        device_dry = {
            phase: spent for phase, spent in counters.device_phases.items() if phase in ("forward", "backward")
        }
        busy = 0.95 * computed + counters.device_phases.get("collective_wait", 0.0)
        return counting(one, device_dry=device_dry, device_waits=0.02 * steps, gpu=replace(counters.gpu, busy=busy))

    candidates = found(window(Training(adjust=computing, clock="device"), spend(late, 0.15)))
    assert candidates.keys() == {{"data_wait": "data", "h2d_copy": "copies"}[late]}


def test_occasional_device_reads_are_not_a_loss() -> None:
    assert not found(window(Training(adjust=dry({"forward": 0.03, "backward": 0.03}, 0.02, 0.1), clock="device")))


@pytest.mark.parametrize("missing", [0.0, 1.0])
@pytest.mark.parametrize("seconds", [1.0, 2.0, 20.0])
def test_a_missing_wait_at_the_edge_of_a_window_makes_no_difference(missing, seconds) -> None:
    """The host may have waited already, or not yet, in the first and last steps of a part."""
    change = dry({"forward": 0.03, "backward": 0.03}, 1.0, 0.1)

    def late(one: RankReading) -> RankReading:
        changed = change(one)
        waits = changed.counters.device_waits - (missing if one.at > 10.0 else 0.0)
        return counting(changed, device_waits=waits)

    one = window(Training(adjust=late, clock="device"), seconds=seconds)
    assert one.lost["device_read"] > 0.0


def test_launches_are_unknown_on_the_host_clock() -> None:
    assert not found(window(Training(adjust=dry({"forward": 0.03, "backward": 0.03}, 0.0, 0.0))))


def test_throttling_of_all_gpus_is_a_loss_of_the_missing_clock() -> None:
    def throttled(one: RankReading) -> RankReading:
        return counting(one, gpu=GpuCounters(one.at, {"power": one.at}, 0.7 * one.at))

    candidate = found(window(Training(adjust=throttled)))["throttling"]
    assert candidate.ratio == pytest.approx(0.3 * 0.93, abs=0.02)
    assert candidate.evidence["clock"] == pytest.approx(0.7)


@pytest.mark.parametrize("is_lowered", [False, True])
def test_a_gpu_at_its_default_power_limit_loses_nothing(is_lowered) -> None:
    """A full load needs more power than an H200 may draw at its highest clock."""

    def capped(one: RankReading) -> RankReading:
        gpu = GpuReading("0", 0.6, 1, 0.0, is_power_limit_lowered=is_lowered)
        capping = GpuCounters(one.at, {"sw_power_cap": one.at, "sw_thermal_slowdown": 0.0}, 0.73 * one.at)
        return counting(replace(one, gpu=gpu), gpu=capping)

    assert found(window(Training(adjust=capped))).keys() == ({"throttling"} if is_lowered else set())


def test_a_low_clock_without_throttling_is_not_a_loss() -> None:
    idle = Training(adjust=lambda one: counting(one, gpu=GpuCounters(one.at, {"power": 0.0}, 0.5 * one.at)))
    assert not found(window(idle))


def test_without_known_clocks_no_time_is_lost_to_throttling() -> None:
    unknown = Training(adjust=lambda one: counting(one, gpu=GpuCounters(one.at, {"power": one.at}, None)))
    assert not found(window(unknown))


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_wait_for_a_planned_phase_of_one_rank_is_lost_to_it_and_not_to_transfer(ranks: int, phase: str) -> None:
    usual = window(Training(ranks), seconds=30.0).lost["transfer"]
    lost = window(Training(ranks), spend(phase, 10.0, 0, every=100), seconds=30.0).lost
    assert lost["transfer"] <= usual
    assert lost[phase] >= 0.2
    assert sum(lost.values()) == pytest.approx(1.0)
