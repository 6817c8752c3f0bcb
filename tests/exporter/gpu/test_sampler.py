"""The sampler exports only what it knows: lost, stuck and absent GPUs have no values, and recover by themselves."""

from __future__ import annotations

import threading
import time

import pynvml
import pytest
from testing.waiting import eventually

from rankscope_exporter.gpu.collector import Gpu, GpuCollector, SampledCollector
from rankscope_exporter.gpu.collectors import gpu, load, memory, power, temperature
from rankscope_exporter.gpu.device_sampler import DeviceSampler, Timing
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.gpu.states import GpuState, GpuStates
from rankscope_exporter.registry import GPU_COLLECTORS
from rankscope_exporter.simulation import simulated_uuid

FAST = Timing(interval=0.02, deadline=2, reopen_after=0.02)
FIRST, SECOND = Gpu(0, simulated_uuid(0)), Gpu(1, simulated_uuid(1))


def uuids_published(sampler: Sampler) -> dict[str, set[str]]:
    """Return the UUIDs of GPUs with a sample, by metric."""
    found: dict[str, set[str]] = {}
    sampler.take_snapshot()
    for collector in GPU_COLLECTORS:
        for family in SampledCollector(collector, sampler.texts).collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).add(sample.labels["uuid"])
    return found


def counts(sampler: Sampler) -> dict[Gpu, object]:
    """Return each GPU's XID events by code."""
    return {gpu: xids.counts for gpu, xids in sampler.xids().items()}


def test_every_gpu_is_read_before_the_sampler_is_ready(sampling):
    _, sampler = sampling("gpus: 4")
    assert sampler.nvml_up
    assert sampler.gpus_seen == sampler.gpus_expected == 4
    assert [found.index for found in sampler.readings(memory.COLLECTOR)] == [0, 1, 2, 3]
    assert all(sampler.readings(memory.COLLECTOR).values())


def test_a_lost_gpu_has_no_values_and_returns(sampling):
    m, sampler = sampling("{gpus: 2, timeline: {1: [{at: 500, lost: true}, {at: 900, lost: false}]}}")
    began = m.clock()

    def everything_is_published() -> bool:
        m.clock.advance(0.1)  # values that are differences between two readings need elapsed time
        return uuids_published(sampler).get("rankscope_gpu_sm_active_seconds_total") == {FIRST.uuid, SECOND.uuid}

    eventually(everything_is_published)
    before = uuids_published(sampler)
    assert all(uuids == {FIRST.uuid, SECOND.uuid} for uuids in before.values())

    m.clock.now = began + 500
    eventually(lambda: sampler.gpus_seen == 1)
    during = uuids_published(sampler)
    assert during.pop("rankscope_gpu_up") == {FIRST.uuid, SECOND.uuid}
    assert all(uuids == {FIRST.uuid} for uuids in during.values())
    assert sampler.readings(gpu.COLLECTOR)[SECOND] is None
    assert sampler.gpus_expected == 2

    m.clock.now = began + 900
    eventually(lambda: sampler.gpus_seen == 2)
    eventually(everything_is_published)
    assert uuids_published(sampler) == before


def test_a_gpu_lost_during_a_reading_is_down_at_once(sampling):
    scenario = "{gpus: 2, timeline: {0: [{at: 5, fails: {nvmlDeviceGetPowerUsage: GPU_IS_LOST}}]}}"
    m, sampler = sampling(scenario)
    m.advance(5, lambda: sampler.readings(gpu.COLLECTOR)[FIRST] is None)
    assert sampler.readings(temperature.COLLECTOR)[FIRST] is None
    assert sampler.gpus_seen == 1


def test_counters_of_a_returning_gpu_continue(sampling):
    scenario = "{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 10, lost: true}, {at: 15, lost: false}]}}"
    m, sampler = sampling(scenario, in_simulated_time=True)

    def busy_seconds() -> float:
        reading = sampler.readings(load.COLLECTOR)[FIRST]
        return reading["gpu"].busy_seconds if reading else -1

    for second in range(1, 10):
        m.advance(1, lambda second=second: busy_seconds() >= second - 1)
    before = busy_seconds()
    assert before > 7
    m.advance(1, lambda: sampler.gpus_seen == 0)
    m.advance(5, lambda: sampler.gpus_seen == 1)
    assert before <= busy_seconds() <= before + 1.01


def test_a_blocking_device_delays_only_itself(sampling):
    m, sampler = sampling(
        "{gpus: 2, timeline: {0: [{at: 5, blocks: {nvmlDeviceGetTemperature: 60}}, {at: 6, blocks: {}}]}}", timing=FAST
    )
    m.advance(5, lambda: sampler.readings(gpu.COLLECTOR)[FIRST] is None)
    assert sampler.readings(memory.COLLECTOR)[FIRST] is None, "readings from before the block are stale as well"
    m.clock.advance(1)
    joules = m.simulated.gpus[1].energy(m.simulated.now())
    eventually(lambda: (reading := sampler.readings(power.COLLECTOR)[SECOND]) and reading.joules >= joules - 1)
    eventually(lambda: sampler.nvml_up)
    assert sampler.readings(gpu.COLLECTOR)[FIRST] is None

    m.unblock.set()
    eventually(lambda: sampler.gpus_seen == 2)


def test_a_gpu_that_blocks_from_the_start_does_not_hide_others(sampling):
    _, sampler = sampling(
        "{gpus: 3, timeline: {0: [{at: 0, blocks: {nvmlDeviceGetHandleByIndex_v2: 60}}]}}", timing=FAST
    )
    eventually(lambda: sampler.gpus_seen == 2)
    assert sampler.gpus_expected == 3
    assert FIRST not in sampler.readings(gpu.COLLECTOR)


def test_a_machine_without_a_driver_is_ready_and_reports_it(sampling):
    _, sampler = sampling("{gpus: 2, driver: [{at: 0, loaded: false}]}")
    assert not sampler.nvml_up
    assert sampler.gpus_seen == sampler.gpus_expected == 0
    assert uuids_published(sampler) == {}


def test_a_driver_that_appears_later_is_connected(sampling):
    m, sampler = sampling("{gpus: 2, driver: [{at: 0, loaded: false}, {at: 5, loaded: true}]}")
    m.advance(5, lambda: sampler.gpus_seen == 2)
    assert sampler.nvml_up
    assert sampler.gpus_expected == 2


def test_the_values_of_an_unloaded_driver_are_dropped_at_once(sampling):
    m, sampler = sampling("{gpus: 2, driver: [{at: 5, loaded: false}]}")
    m.advance(5, lambda: not sampler.nvml_up)
    assert set(uuids_published(sampler)) == {"rankscope_gpu_up"}, "although none is stale"


def test_the_gpus_of_an_unloaded_driver_return_with_it(sampling):
    m, sampler = sampling(
        "{gpus: 2, driver: [{at: 5, loaded: false}, {at: 9, loaded: true}], timeline: {0: [{at: 12, xid: 31}]}}",
        timing=FAST,
    )
    m.advance(5, lambda: not sampler.nvml_up and sampler.gpus_seen == 0)
    assert sampler.gpus_expected == 2, "missing GPUs are known from before"
    m.advance(4, lambda: sampler.nvml_up and sampler.gpus_seen == 2)
    eventually(lambda: sampler._watcher and len(sampler._watcher._registered) == 2)
    m.advance(3, lambda: counts(sampler)[FIRST] == {31: 1})


def test_every_xid_is_counted_including_repeated_codes(sampling):
    m, sampler = sampling(
        "{gpus: 2, timeline: {1: [{at: 5, xid: 31}, {at: 6, xid: 31}, {at: 7, xid: 79, lost: true}, {at: 7, xid: 31}]}}"
    )
    eventually(lambda: counts(sampler) == {FIRST: {}, SECOND: {}})
    m.advance(6, lambda: counts(sampler)[SECOND] == {31: 2})
    assert sampler.xids()[FIRST].last == {}
    assert set(sampler.xids()[SECOND].last) == {31}
    m.advance(1, lambda: counts(sampler)[SECOND] == {31: 3, 79: 1})
    eventually(lambda: sampler.gpus_seen == 1)
    assert counts(sampler) == {FIRST: {}, SECOND: {31: 3, 79: 1}}, "the last events of a lost GPU are kept"


def test_a_gpu_whose_driver_reports_no_xids_has_no_xid_counts(sampling):
    scenario = "{gpus: 2, timeline: {0: [{at: 0, fails: {nvmlDeviceGetSupportedEventTypes: NOT_SUPPORTED}}]}}"
    _, sampler = sampling(scenario)
    eventually(lambda: counts(sampler) == {FIRST: None, SECOND: {}})


def test_a_failing_value_affects_only_its_own_collector(sampling, caplog):
    scenario = "{gpus: 2, timeline: {0: [{at: 0, fails: {nvmlDeviceGetPowerUsage: UNKNOWN}}]}}"
    _, sampler = sampling(scenario)
    assert sampler.readings(power.COLLECTOR)[FIRST] is None
    assert sampler.readings(power.COLLECTOR)[SECOND] is not None
    assert sampler.readings(temperature.COLLECTOR)[FIRST] is not None
    assert sampler.gpus_seen == 2
    time.sleep(10 * FAST.interval)
    assert [record.message for record in caplog.records] == [
        "GPU 0: power read failed: nvmlDeviceGetPowerUsage: Unknown Error"
    ]


def test_a_bug_in_a_collector_is_raised_only_when_it_is_collected(sampling):
    def mistaken(_device, _tick):
        raise ZeroDivisionError("a mistake")

    broken = GpuCollector("broken", "cannot work", lambda: mistaken, ())
    _, sampler = sampling("gpus: 1", collectors=(broken, temperature.COLLECTOR))
    sampler.take_snapshot()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        SampledCollector(broken, sampler.texts).collect()
    assert sampler.readings(temperature.COLLECTOR)[FIRST] is not None


def test_a_disabled_collector_makes_no_driver_calls(sampling, monkeypatch):
    asked = []
    real = pynvml.nvmlDeviceGetPowerUsage
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetPowerUsage", lambda *arguments: asked.append(arguments) or real(*arguments)
    )
    _, without = sampling(
        "gpus: 1", collectors=[collector for collector in GPU_COLLECTORS if collector is not power.COLLECTOR]
    )
    without.stop()
    assert asked == []
    sampling("gpus: 1")
    assert asked != []


STUCK_AND_THEN_UNLOADED = """
gpus: 2
driver: [{at: 6, loaded: false}]
timeline: {0: [{at: 5, blocks: {nvmlDeviceGetTemperature: 60}}]}
"""


def connections(monkeypatch) -> list[int]:
    """Return a list that grows by one with each connection to the driver."""
    made: list[int] = []
    real = pynvml.nvmlInit
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: made.append(1) or real())
    return made


def test_missing_gpus_trigger_a_reconnect_while_the_others_stay_up(sampling, monkeypatch):
    made = connections(monkeypatch)
    timing = Timing(interval=0.02, deadline=30, reopen_after=0.02, reconnect_after=0.2)
    m, sampler = sampling("{gpus: 2, timeline: {0: [{at: 5, lost: true}]}}", timing=timing)
    time.sleep(3 * timing.reconnect_after)
    assert len(made) == 1, "no reconnect while all GPUs are present"
    m.advance(5, lambda: len(made) >= 3)
    assert sampler.readings(gpu.COLLECTOR)[SECOND] is not None


def test_the_driver_is_not_closed_during_a_stuck_call(sampling, monkeypatch):
    made = connections(monkeypatch)
    timing = Timing(interval=0.02, deadline=0.2, reopen_after=0.02, reconnect_after=0.1)
    m, sampler = sampling(STUCK_AND_THEN_UNLOADED, timing=timing)
    m.advance(5, lambda: sampler._devices[0].is_stuck)
    eventually(lambda: sampler._devices[1].worker.is_running)
    healthy = sampler._devices[1]
    time.sleep(5 * timing.reconnect_after)
    assert sampler._devices[1] is healthy
    assert not healthy.worker._stop.is_set(), "the others are not interrupted"
    m.advance(1, lambda: not sampler.nvml_up)
    time.sleep(5 * timing.interval)
    assert len(made) == pynvml._nvmlLib_refcount == 1


def test_stopping_ends_every_thread_and_releases_the_handles(sampling):
    before = {thread.name for thread in threading.enumerate()}
    _, sampler = sampling("gpus: 2")
    eventually(lambda: {"sampler", "xid", "gpu-0", "gpu-1"} <= {thread.name for thread in threading.enumerate()})
    sampler.stop()
    assert {thread.name for thread in threading.enumerate()} <= before
    assert pynvml._nvmlLib_refcount == 0


def test_a_gap_between_readings_is_not_integrated(machine):
    ticks = []
    collector = GpuCollector("ticks", "remembers them", lambda: lambda _device, tick: ticks.append(tick), ())
    m = machine("{gpus: 1, timeline: {0: [{at: 100, lost: true}, {at: 102, lost: false}]}}")
    assert m.driver.connect()
    state = GpuState(FIRST, [collector])
    timing = Timing(unix=m.clock, monotonic=m.clock)
    sampler = DeviceSampler(0, m.driver.device, lambda _device: state, timing)
    for at in (0, 1, 3, 60, 61, 101, 103, 104):
        m.clock.now = m.simulated.start_unix + at
        sampler.round()
    assert [tick.unix - m.simulated.start_unix for tick in ticks] == [0, 1, 3, 60, 61, 103, 104]
    assert [tick.elapsed for tick in ticks] == [0, 1, 2, 0, 1, 0, 1]


def test_a_visible_device_already_has_its_state(machine):
    m = machine("gpus: 1")
    assert m.driver.connect()
    seen = []

    def state_of(_device) -> GpuState:
        seen.append(sampler.device)
        return GpuState(FIRST, ())

    sampler = DeviceSampler(0, m.driver.device, state_of, Timing())
    sampler.round()
    assert seen == [None]
    assert sampler.device is not None


def test_readings_are_periodic_and_a_lost_device_is_retried_less_often(machine):
    m = machine(
        "{gpus: 1, timeline: {0: [{at: 0, blocks: {nvmlDeviceGetPerformanceState: 0.25}}, {at: 9, lost: true}]}}"
    )
    assert m.driver.connect()
    timing = Timing(unix=m.clock, monotonic=m.clock)
    sampler = DeviceSampler(0, m.driver.device, lambda _device: GpuState(FIRST, ()), timing)
    assert sampler.round() == pytest.approx(0.75)
    m.clock.advance(9)
    assert sampler.round() == timing.reopen_after == 5


def test_a_reading_is_valid_for_at_least_three_intervals():
    assert Timing().stale_after == 5
    assert Timing(interval=10).stale_after == 30


ZEROS = "GPU-00000000-0000-0000-0000-000000000000"


def reporting(monkeypatch, *uuids: str | bytes) -> None:
    """Make the driver report these UUIDs, in the order of the GPUs."""
    real = pynvml.nvmlDeviceGetUUID

    def reported(handle) -> str:
        index = int(real(handle)[-1])
        uuid = uuids[index] if index < len(uuids) else real(handle)
        return uuid if isinstance(uuid, str) else uuid.decode()

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", reported)


@pytest.mark.parametrize(
    ("uuids", "labels"),
    [
        ([ZEROS, ZEROS], [f"{ZEROS}#0", f"{ZEROS}#1", simulated_uuid(2)]),
        ([ZEROS, ZEROS, ZEROS], [f"{ZEROS}#0", f"{ZEROS}#1", f"{ZEROS}#2"]),
        (["", ""], ["GPU#0", "GPU#1", simulated_uuid(2)]),
        ([""], ["GPU#0", simulated_uuid(1), simulated_uuid(2)]),
        ([ZEROS], [f"{ZEROS}#0", simulated_uuid(1), simulated_uuid(2)]),
        ([simulated_uuid(2)], [f"{simulated_uuid(2)}#0", simulated_uuid(1), f"{simulated_uuid(2)}#2"]),
        ([b"GPU-\xff"], ["GPU-\ufffd", simulated_uuid(1), simulated_uuid(2)]),
    ],
    ids=["two zeros", "three zeros", "two empty", "one empty", "one zeros", "two equal", "not UTF-8"],
)
def test_gpus_with_the_same_uuid_are_exported_separately(sampling, monkeypatch, caplog, uuids, labels):
    reporting(monkeypatch, *uuids)
    scenario = "{gpus: 3, timeline: {0: [{at: 0, busy: 1}, {at: 99, xid: 31}]}}"
    m, sampler = sampling(scenario, in_simulated_time=True)
    gpus = [Gpu(index, uuid) for index, uuid in enumerate(labels)]

    def everything_is_published() -> bool:
        m.clock.advance(0.1)
        return uuids_published(sampler).get("rankscope_gpu_sm_active_seconds_total") == set(labels)

    eventually(everything_is_published)
    assert all(uuids == set(labels) for uuids in uuids_published(sampler).values())
    eventually(lambda: sampler._watcher and len(sampler._watcher._registered) >= 3)
    m.clock.now = m.simulated.start_unix + 100
    eventually(lambda: counts(sampler) == {gpus[0]: {31: 1}, gpus[1]: {}, gpus[2]: {}})
    eventually(lambda: sampler.readings(load.COLLECTOR)[gpus[0]]["gpu"].busy_seconds >= 9)
    busy = {gpu: reading["gpu"].busy_seconds > 0 for gpu, reading in sampler.readings(load.COLLECTOR).items()}
    assert busy == {gpus[0]: True, gpus[1]: False, gpus[2]: False}
    logged = [record.message for record in caplog.records if "ambiguous UUID" in record.message]
    assert len(logged) == sum("#" in label for label in labels), "once for each GPU"


def test_a_returning_gpu_with_a_shared_uuid_keeps_its_label_and_counters(machine, monkeypatch):
    m = machine("gpus: 2")
    reporting(monkeypatch, ZEROS, ZEROS)
    gpus = GpuStates(GPU_COLLECTORS, lambda: 0.0)
    first, second = m.device(0), m.device(1)
    states = gpus.state_of(first), gpus.state_of(second)
    for device in (first, second):
        device.close()
    assert (gpus.state_of(m.device(1)), gpus.state_of(m.device(0))) == (states[1], states[0])
    assert [state.gpu for state in states] == [Gpu(0, f"{ZEROS}#0"), Gpu(1, f"{ZEROS}#1")]


def test_a_gpu_that_moves_to_another_index_keeps_its_uuid(machine):
    m = machine("gpus: 2")
    gpus = GpuStates(GPU_COLLECTORS, lambda: 0.0)
    before = m.device(1)
    state = gpus.state_of(before)
    before.close()
    after = m.device(1)
    after.index = 0
    assert gpus.state_of(after) is state
    assert list(gpus.latest().values(gpu.COLLECTOR)) == [state.gpu] == [Gpu(0, simulated_uuid(1))]


def test_a_gpu_counts_as_missing_only_after_all_have_been_read(machine):
    m = machine("gpus: 1")
    sampler = Sampler(m.driver, GPU_COLLECTORS, timing=FAST)
    assert not sampler.lacks(simulated_uuid(7)), "nothing has been read yet"
    sampler.start()
    try:
        eventually(lambda: sampler.is_ready)
        assert sampler.lacks(simulated_uuid(7))
        assert not sampler.lacks(simulated_uuid(0))
    finally:
        sampler.stop()


def test_a_lost_gpu_does_not_count_as_missing(sampling):
    m, sampler = sampling("{gpus: 2, timeline: {1: [{at: 5, lost: true}]}}")
    m.advance(5, lambda: sampler.gpus_seen == 1)
    assert not sampler.lacks(SECOND.uuid)


def test_a_machine_without_gpus_lacks_every_one(sampling):
    _, sampler = sampling("{gpus: 1, driver: [{at: 0, loaded: false}]}")
    assert sampler.lacks(FIRST.uuid)


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetName", "nvmlSystemGetDriverVersion"])
@pytest.mark.parametrize("text", [b"NVIDIA \xff\xfe", b"\x80", b"H100\xc3"])
def test_text_that_is_not_utf_8_fails_no_collector(sampling, monkeypatch, symbol, text):
    real = getattr(pynvml, symbol)
    monkeypatch.setattr(pynvml, symbol, lambda *arguments: (real(*arguments), text.decode())[1])
    _, sampler = sampling("{gpus: 2, model: {like: A100, mig: [3g.20gb]}}")
    published = uuids_published(sampler)
    assert published["rankscope_gpu_info"] == published["rankscope_gpu_mig_info"] == {FIRST.uuid, SECOND.uuid}
    identity = sampler.readings(gpu.COLLECTOR)[FIRST]
    assert text.decode(errors="replace") in (identity.name, identity.driver_version)


def test_all_metrics_of_a_page_have_the_readings_of_its_beginning(machine):
    m = machine("gpus: 2")
    sampler = Sampler(m.driver, (gpu.COLLECTOR, temperature.COLLECTOR), timing=FAST)
    sampler.take_snapshot()
    sampler.start()
    try:
        eventually(lambda: sampler.is_ready)
        assert sampler.texts(gpu.COLLECTOR) == sampler.texts(temperature.COLLECTOR) == []
        sampler.take_snapshot()
        assert set(sampler.values(gpu.COLLECTOR)) == set(sampler.values(temperature.COLLECTOR)) == {FIRST, SECOND}
    finally:
        sampler.stop()
