"""GPU readings for the diagnosis, from a simulated machine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.collector import Gpu, Tick
from rankscope_exporter.gpu.collectors import allocation, pcie
from rankscope_exporter.gpu.collectors.allocation import Allocation
from rankscope_exporter.gpu.collectors.pcie import Pcie
from rankscope_exporter.gpu.nvml.links import PcieLink
from rankscope_exporter.gpu.rank_gpus import RankGpu, RankGpus
from rankscope_exporter.registry import GPU_COLLECTORS, HELP

GPU = Gpu(2, "GPU-2")


class SampledGpu:
    """The first GPU of a simulated machine, read once a second."""

    def __init__(self, machine: Any, collectors: frozenset[str] = frozenset(HELP)) -> None:
        self._clock, self._device = machine.clock, machine.device()
        self._readers = {collector: collector.reader() for collector in GPU_COLLECTORS}
        self._readings: dict[Any, Any] = {}
        self._gpus = RankGpus(collectors)
        self._gpus.sampler = SimpleNamespace(readings=lambda collector: {GPU: self._readings[collector]})

    def after(self, seconds: int) -> RankGpu:
        for _ in range(seconds):
            self._clock.advance(1)
            tick = Tick(self._clock(), 1.0)
            self._readings = {collector: read(self._device, tick) for collector, read in self._readers.items()}
            found = self._gpus(self._clock())
        return found[GPU.uuid]

    def allocate(self, collector: Any) -> None:
        """Read the holders with this collector."""
        self._readers[collector], self._gpus.allocation = collector.reader(), collector

    def lose(self) -> RankGpu | None:
        """Return the GPU while no collector has a reading."""
        self._readings = dict.fromkeys(self._readings)
        return self._gpus(self._clock()).get(GPU.uuid)


def test_a_gpu_is_read_with_its_counters(machine) -> None:
    state = "{at: 0, busy: 0.8, memory_used: 40 GiB, processes: [{pid: 1}, {pid: 2}]}"
    gpu = SampledGpu(machine(f"{{gpus: 1, model: H100, timeline: {{0: [{state}]}}}}"))
    first, second = gpu.after(20), gpu.after(20)
    assert (first.reading.index, first.reading.processes, sorted(first.pids)) == ("2", 2, [1, 2])
    assert first.reading.memory_ratio == pytest.approx(0.5, abs=0.02)
    assert (first.reading.is_link_reduced, first.reading.is_power_limit_lowered) == (False, False)
    assert (second.counters.busy or 0) - (first.counters.busy or 0) == pytest.approx(16.0, abs=1.0)
    assert first.counters.throttled == dict.fromkeys(first.counters.throttled or {}, 0.0)


def test_the_clock_is_integrated_as_a_ratio_of_its_maximum(machine) -> None:
    scenario = "{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 20, busy: 1, throttle: [hw_thermal_slowdown]}]}}"
    gpu = SampledGpu(machine(scenario))
    begin, healthy, throttled = (gpu.after(seconds).counters for seconds in (5, 10, 25))
    spent = [counters.clock_ratio_seconds or 0.0 for counters in (begin, healthy, throttled)]
    assert 0.8 * 10 < spent[1] - spent[0] <= 10.0
    assert (spent[2] - spent[1]) / 25 < 0.95 * (spent[1] - spent[0]) / 10
    assert sum((healthy.throttled or {}).values()) == 0.0
    assert max((throttled.throttled or {}).values()) == pytest.approx(20.0, abs=2.0)


@pytest.mark.parametrize(("reason", "is_throttled"), [("hw_thermal_slowdown", True), ("sync_boost", False)])
def test_a_gpu_slowed_down_with_its_group_is_not_throttled(machine, reason, is_throttled) -> None:
    gpu = SampledGpu(machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, busy: 1, throttle: [{reason}]}}]}}}}"))
    assert bool(sum((gpu.after(10).counters.throttled or {}).values())) == is_throttled


def test_a_gpu_that_was_never_busy_is_idle_since_first_seen(machine) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 0}]}}"))
    assert gpu.after(30).reading.idle_seconds == pytest.approx(30.0, abs=2.0)


def test_an_idle_gpu_reports_its_idle_time(machine) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 10, busy: 0}]}}"))
    assert gpu.after(30).reading.idle_seconds == pytest.approx(20.0, abs=2.0)


def test_a_gpu_with_fewer_active_nvlinks_has_a_reduced_link(machine) -> None:
    down = "{gpus: 1, model: H100, timeline: {0: [{at: 0, busy: 1}, {at: 20, busy: 1, nvlinks_down: 2}]}}"
    gpu = SampledGpu(machine(down))
    assert gpu.after(10).reading.is_link_reduced is False
    assert gpu.after(40).reading.is_link_reduced


@pytest.mark.parametrize(("width", "is_reduced"), [(8, True), (16, False), (None, None)])
def test_a_pcie_link_with_fewer_lanes_than_possible_is_reduced(width: int | None, is_reduced: bool | None) -> None:
    link = Pcie(PcieLink(4, width), PcieLink(4, 16), None, {})
    gpus = RankGpus(HELP)
    gpus.sampler = SimpleNamespace(readings=lambda one: {GPU: link} if one is pcie.COLLECTOR else {})
    reading = gpus(0.0)[GPU.uuid].reading
    assert reading.is_link_reduced is is_reduced
    assert reading.is_power_limit_lowered is None


def test_a_gpu_that_does_not_answer_is_absent(machine) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}"))
    assert (gpu.after(10).counters.clock_ratio_seconds or 0.0) > 5.0
    assert gpu.lose() is None


def test_values_of_disabled_collectors_are_unknown(machine) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}"), frozenset({"clocks"})).after(5)
    assert (gpu.reading.memory_ratio, gpu.reading.processes, gpu.reading.idle_seconds) == (None, None, None)
    assert gpu.counters.busy is None
    assert gpu.counters.clock_ratio_seconds is not None


def test_no_gpu_is_known_before_the_sampler_is_assigned() -> None:
    assert RankGpus(HELP)(0.0) == {}


@pytest.mark.parametrize(
    ("namespaces", "expected"),
    [([], ""), (["train"], "train"), (["train", "train"], "train"), (["train", "other"], "")],
)
def test_the_namespace_of_a_gpu_is_known_if_all_its_pods_have_the_same_one(
    machine, namespaces: list[str], expected: str
) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}"))
    assert gpu.after(3).namespace == ""
    holders = [Holder("kubernetes", k8s_namespace=one, k8s_pod="p") for one in namespaces]
    watched = replace(
        allocation.COLLECTOR, reader=lambda: lambda _device, _tick: Allocation([*holders, Holder("process")], "", {})
    )
    gpu.allocate(watched)
    assert gpu.after(3).namespace == expected


@pytest.mark.parametrize(
    ("ranks", "foreign"),
    [
        ({1: "GPU-2"}, (5.0, 3)),
        ({1: "GPU-2", 2: "GPU-2", 3: "GPU-2"}, (0.0, None)),
        ({1: "GPU-2", 2: "GPU-7"}, (3.0, 3)),
        ({0: "GPU-2"}, (None, None)),
        ({1: "GPU-2", 9: "GPU-2"}, (None, None)),
        ({}, (None, None)),
    ],
    ids=["one rank", "only ranks", "a context of another rank", "unseen", "one unseen", "none"],
)
def test_the_memory_of_processes_that_are_no_ranks_is_known_if_the_ranks_are(
    machine, ranks: dict[int, str], foreign: tuple[float | None, int | None]
) -> None:
    gpu = SampledGpu(machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}")).after(2)
    reading = gpu._replace(pids=(1, 2, 3), sizes={1: 8, 2: 2, 3: 3}).without(ranks, "GPU-2")
    assert (reading.foreign_bytes, reading.foreign_pid) == foreign


def test_the_memory_of_other_processes_is_unknown_if_the_driver_does_not_say_the_size_of_one(machine) -> None:
    state = "{at: 0, memory_used: 40 GiB, processes: [{pid: 1, memory: 8 GiB}, {pid: 2, memory: 3 GiB}]}"
    gpu = SampledGpu(machine(f"{{gpus: 1, model: H100, timeline: {{0: [{state}]}}}}")).after(2)
    assert gpu.without({1: "GPU-2"}, "GPU-2").foreign_bytes == 3 * 2**30
    assert gpu._replace(sizes={**gpu.sizes, 2: None}).without({1: "GPU-2"}, "GPU-2").foreign_bytes is None
