"""Every state occurs on a simulated GPU with real NVML calls, and the states add up to the observed time."""

from __future__ import annotations

import os

import pynvml
import pytest
from testing.records import READ_AT, rank_snapshot

from rankscope.record import layout
from rankscope_exporter.gpu.allocation.claims import Claims
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.idleness import STATES
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames, look_up
from rankscope_exporter.gpu.collector import Gpu, Tick
from rankscope_exporter.gpu.collectors.allocation import COLLECTOR, AllocationMeter
from rankscope_exporter.gpu.nvml.mig import mig_instances
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.simulation import simulated_uuid

ALIVE = "SELF"  # replaced by this process's pid, which would make test names differ between pytest workers
DEAD = 4_194_305  # larger than any pid on Linux (2**22)
UUID = simulated_uuid(0)
JOB = Holder("slurm", slurm_job_id="7", user="alice")
NO_CLAIMS = Claims(is_complete=True)
NO_RING = "fails: {nvmlDeviceGetSamples: NOT_SUPPORTED}"


class AllocatedGpu:
    """A simulated GPU, read once a second by a meter with claims and processes set by the test."""

    def __init__(self, machine, timeline: str, sees_all: bool = True) -> None:
        self.machine = machine(f"{{gpus: 1, timeline: {{0: [{timeline.replace(ALIVE, str(os.getpid()))}]}}}}")
        self.device = self.machine.device()
        self.claims = NO_CLAIMS
        self.meter = AllocationMeter(lambda: self.claims, ProcessTable(sees_all=sees_all), UserNames())
        self.last = self.meter(self.device, Tick(self.machine.clock(), 0.0))

    def run(self, seconds: int):
        for _ in range(seconds):
            self.machine.clock.advance(1)
            self.last = self.meter(self.device, Tick(self.machine.clock(), 1.0))
        return self.last

    def spent(self) -> dict[str, float]:
        return {state: seconds for state, seconds in self.last.seconds.items() if seconds}


def ranks(silent_for: float) -> Claims:
    """Return a claim by a living rank on the GPU without progress for this many seconds."""
    slots = {"started_monotonic": READ_AT - silent_for, "phase": layout.FORWARD}  # no time charged since
    snapshot = rank_snapshot(slots, run="train", rank="3", uuid=UUID)
    return Claims({}, True, {UUID: [Rank(snapshot, None, owner=1000)]})


@pytest.mark.parametrize(
    ("timeline", "claims", "state"),
    [
        ("{at: 0}", NO_CLAIMS, "free"),
        ("{at: 0}", Claims({"0": [JOB]}, True), "allocated_no_process"),
        ("{at: 0}", Claims({UUID: [JOB]}, True), "allocated_no_process"),
        ("{at: 0}", ranks(1), "allocated_no_process"),
        ("{at: 0}", Claims(), "unknown"),
        (f"{{at: 0, processes: [{{pid: {ALIVE}, memory: 8 GiB}}]}}", NO_CLAIMS, "process_no_work"),
        (f"{{at: 0, busy: 0.1, processes: [{{pid: {ALIVE}}}]}}", NO_CLAIMS, "working"),
        (f"{{at: 0, waiting: 1, processes: [{{pid: {ALIVE}}}]}}", ranks(1), "working"),
        (f"{{at: 0, waiting: 1, processes: [{{pid: {ALIVE}}}]}}", ranks(301), "suspected_hang"),
        (f"{{at: 0, processes: [{{pid: {DEAD}, memory: 8 GiB}}]}}", NO_CLAIMS, "memory_held_by_dead"),
        ("{at: 0, memory_used: 8 GiB}", NO_CLAIMS, "memory_held_by_dead"),
        ("{at: 0, memory_used: 1 GiB}", NO_CLAIMS, "free"),
        (f"{{at: 0, {NO_RING}, busy: 1, processes: [{{pid: {ALIVE}}}]}}", NO_CLAIMS, "working"),
    ],
)
def test_facts_about_a_gpu_determine_its_state(machine, timeline, claims, state):
    gpu = AllocatedGpu(machine, timeline)
    gpu.claims = claims
    assert gpu.run(5).state == state
    assert gpu.spent() == {state: 5}


def test_without_visible_processes_living_ranks_count_as_processes(machine):
    gpu = AllocatedGpu(machine, "{at: 0}", sees_all=False)
    assert gpu.run(1).state == "unknown"
    gpu.claims = ranks(1)
    assert gpu.run(1).state == "process_no_work"


def test_the_states_add_up_to_the_observed_time(machine):
    process = f"processes: [{{pid: {ALIVE}, memory: 8 GiB}}]"
    gpu = AllocatedGpu(
        machine,
        f"""{{at: 0}}, {{at: 20, {process}}}, {{at: 40, busy: 1}}, {{at: 100, busy: 0}},
            {{at: 200, processes: [{{pid: {DEAD}, memory: 8 GiB}}]}}, {{at: 230, processes: []}}""",
    )
    gpu.run(300)
    assert sum(gpu.last.seconds.values()) == 300
    assert gpu.spent() == pytest.approx(
        {"free": 20 + 70, "process_no_work": 20 + 40, "working": 60 + 60, "memory_held_by_dead": 30}, abs=2
    )


def test_a_gap_adds_no_time(machine):
    gpu = AllocatedGpu(machine, "{at: 0}")
    gpu.run(3)
    gpu.machine.clock.advance(1000)
    gpu.meter(gpu.device, Tick(gpu.machine.clock(), 0.0))
    assert gpu.run(2).seconds["free"] == 5


def test_every_state_starts_at_0(machine):
    assert AllocatedGpu(machine, "{at: 0}").last.seconds == dict.fromkeys(STATES, 0.0)


def test_a_device_without_processes_and_utilization_has_no_state(machine):
    fails = ", ".join(
        f"{symbol}: NOT_SUPPORTED"
        for symbol in (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetSamples",
            "nvmlDeviceGetUtilizationRates",
        )
    )
    assert AllocatedGpu(machine, f"{{at: 0, fails: {{{fails}}}}}").last is None


def test_holders_are_claims_and_processes_on_the_gpu(machine):
    gpu = AllocatedGpu(machine, f"{{at: 0, processes: [{{pid: {ALIVE}}}, {{pid: {DEAD}}}]}}", sees_all=False)
    gpu.claims = Claims({"0": [JOB]}, True, ranks(1).ranks)
    holders = gpu.run(1).holders
    assert holders == [
        JOB,
        Holder("rank", run="train", rank="3", owner="1000", uid="1000"),
        Holder("process"),
        Holder("process"),
    ]


def test_a_gpu_has_one_series_for_all_holders_and_none_if_free(machine):
    gpu = AllocatedGpu(machine, "{at: 0}")
    free = gpu.last
    gpu.claims = Claims({"0": [JOB, Holder("slurm", slurm_job_id="8")]}, True)
    info, state, seconds, _ = COLLECTOR.families({Gpu(0, UUID): gpu.run(1), Gpu(1, simulated_uuid(1)): free})
    (sample,) = info.samples
    assert {label: value for label, value in sample.labels.items() if value} == {
        "gpu": "0",
        "uuid": UUID,
        "source": "slurm",
        "slurm_job_id": "7,8",
        "user": "alice",
    }
    assert [s.labels["state"] for s in state.samples] == ["allocated_no_process", "free"]
    assert len(seconds.samples) == 2 * len(STATES)


SPLIT = "{gpus: 1, model: {like: A100, mig: [3g.20gb, 1g.5gb]}}"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("prefix", ["MIG-", "GPU-"])
def test_the_holder_of_a_mig_instance_holds_its_gpu(machine, number, prefix):
    device = machine(SPLIT).device()
    name = prefix + mig_instances(device)[number].uuid.removeprefix("MIG-")
    rank = Rank(rank_snapshot(run="train", rank="3", uuid=name), None, owner=1000)
    for claims in (Claims({name: [JOB]}, True), Claims({}, True, {name: [rank]})):
        meter = AllocationMeter(lambda claims=claims: claims, ProcessTable(sees_all=True), UserNames())
        allocation = meter(device, Tick(0.0, 0.0))
        assert allocation.state == "allocated_no_process"
        assert len(allocation.holders) == 1


@pytest.mark.parametrize(
    ("fault", "holder"), [("", "nvidia1"), ("fails: {nvmlDeviceGetMinorNumber: NOT_SUPPORTED}", "nvidia0")]
)
def test_a_device_file_matches_the_gpus_minor_number(machine, monkeypatch, fault, holder):
    device = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, {fault}}}]}}}}").device()
    if not fault:
        monkeypatch.setattr(device, "minor_number", lambda: 1)
    states = {}
    for name in ("nvidia0", "nvidia1"):
        claims = Claims({name: [JOB]}, True)
        meter = AllocationMeter(lambda claims=claims: claims, ProcessTable(sees_all=True), UserNames())
        states[name] = meter(device, Tick(0.0, 0.0)).state
    assert [name for name, state in states.items() if state == "allocated_no_process"] == [holder]


def test_an_instance_of_another_gpu_is_not_a_claim(machine):
    device = machine(SPLIT).device()
    claims = Claims({"MIG-00000009-0000-4000-8000-000000000000": [JOB]}, True)
    meter = AllocationMeter(lambda: claims, ProcessTable(sees_all=True), UserNames())
    assert meter(device, Tick(0.0, 0.0)).state == "free"


@pytest.mark.parametrize(
    ("scenario", "claim", "state"),
    [
        ("model: {like: A100, mig: [3g.20gb, 1g.5gb]}", "MIG", "unknown"),
        ("model: {like: A100, mig: [3g.20gb, 1g.5gb]}", "MIG of another GPU", "free"),
        ("model: {like: A100, mig: [3g.20gb, 1g.5gb]}", "GPU of another node", "free"),
        ("model: {like: A100}", "MIG", "free"),
    ],
)
def test_a_claim_to_an_instance_makes_a_gpu_unknown_that_hides_its_instances(
    machine, monkeypatch, scenario, claim, state
):
    device = machine(f"{{gpus: 1, {scenario}}}").device()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", not_permitted)
    instance = "MIG-00000009-0000-4000-8000-000000000000"
    claims = Claims({instance if "MIG" in claim else "GPU-9": [JOB]}, True)
    table = ProcessTable(sees_all=True)
    occupants = Occupants(table)
    if claim == "MIG of another GPU":
        occupants.record("GPU-1", look_up((), table), [instance])
    meter = AllocationMeter(lambda: claims, table, UserNames(), occupants)
    assert meter(device, Tick(0.0, 0.0)).state == state


def not_permitted(*_arguments: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)


def test_a_claim_to_an_ambiguous_uuid_makes_unclaimed_gpus_unknown(machine):
    device = machine("gpus: 1").device()
    device.reported_uuid, device.uuid = "GPU-0", "GPU-0#0"
    states = {}
    for name in ("GPU-0", "GPU-1", "0"):
        claims = Claims({name: [JOB]}, True)
        meter = AllocationMeter(lambda claims=claims: claims, ProcessTable(sees_all=True), UserNames())
        states[name] = meter(device, Tick(0.0, 0.0)).state
    assert states == {"GPU-0": "unknown", "GPU-1": "free", "0": "allocated_no_process"}


def test_the_default_collector_sees_processes(machine):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, processes: [{{pid: {os.getpid()}}}]}}]}}}}")
    assert COLLECTOR.reader()(m.device(), Tick(m.clock(), 0)).state == "process_no_work"
