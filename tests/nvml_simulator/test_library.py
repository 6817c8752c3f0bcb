"""The C library is loaded by the real pynvml as NVIDIA's is, and says what the Python simulator says."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
import yaml
from nvml_simulator import LIBRARY, environment, install

from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import Scenario, parse_scenario
from rankscope_exporter.simulation.values import ScenarioError

DESCRIBE = Path(__file__).parent / "describe.py"
BEGAN_BEFORE = 100.0  # seconds: what changed before and does not change now is the same in both simulators

# Symbols that only the Python simulator has: to the exporter, functions that an older driver does not have.
ONLY_IN_PYTHON = frozenset(
    {
        "nvmlDeviceGetBAR1MemoryInfo",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetMemoryErrorCounter",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        "nvmlDeviceGetRowRemapperHistogram",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetVirtualizationMode",
        "nvmlGpmMetricsGet",
        "nvmlGpmMigSampleGet",
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleFree",
        "nvmlGpmSampleGet",
    }
)

EVERYTHING = """
gpus: 4
model: {name: Small, memory: 16 GiB, power_idle: 20, power_max: 300, sm_clock: 1500, memory_clock: 900}
timeline:
  0:
    - {at: 0, busy: 1}
    - {at: 10.2, busy: 0.37, waiting: 0.2, throttle: [sw_power_cap, sw_thermal_slowdown]}
  1:
    - {at: 3, processes: [{pid: 7, memory: 3 GiB}, {pid: 8, memory: 1 GiB, contexts: [graphics]}], lost: true}
    - {at: 40, lost: false, temperature: 81.6}
  2:
    - {at: 0, memory_used: 900 TiB}
    - {at: 20, fails: {nvmlDeviceGetPowerUsage: NOT_SUPPORTED, nvmlDeviceGetTemperature: NO_PERMISSION}}
"""


# Never the same share in two sample periods; and a GPU that has just begun to work, so that it grows warmer.
BURSTS = [{"at": 60 + number * 0.37, "busy": number * 0.137 % 0.6, "waiting": 0.013} for number in range(400)]
CHANGING = yaml.safe_dump(
    {"gpus": 2, "timeline": {0: BURSTS, 1: [{"at": 0, "waiting": 0.3}, {"at": BEGAN_BEFORE - 5, "busy": 0.6}]}}
)


class Machine:
    """A directory with the library and a scenario that began a while ago."""

    def __init__(self, directory: Path, scenario: Scenario) -> None:
        self.directory = directory
        self.start_unix = time.time() - BEGAN_BEFORE
        install(directory, scenario, self.start_unix)

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python where the library is found."""
        variables = {**os.environ, **environment(self.directory), **variables}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)

    def answers(self, program: str) -> str:
        """What a program prints that has initialized `pynvml` as n, and has GPU 0's handle in h."""
        begin = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        done = self.python("-c", begin + program)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    return lambda scenario: Machine(tmp_path, parse_scenario(yaml.safe_load(scenario)))


def in_python(scenario: str, start_unix: float) -> list[dict[str, object]]:
    """What the Python simulator says now of a scenario that began then."""
    now = [start_unix]
    simulated = SimulatedDriver(parse_scenario(yaml.safe_load(scenario)), clock=lambda: now[0])
    now[0] = time.time()
    with installed(simulated):
        described: list[dict[str, object]] = runpy.run_path(str(DESCRIBE))["describe_all"]()
    return described


def test_both_simulators_say_the_same(machine):
    m = machine(EVERYTHING)
    before = in_python(EVERYTHING, m.start_unix)
    done = m.python(str(DESCRIBE))
    after = in_python(EVERYTHING, m.start_unix)
    assert done.returncode == 0, done.stderr
    for earlier, said, later in zip(before, json.loads(done.stdout), after, strict=True):
        energy, samples = said.pop("energy"), said.pop("samples")
        assert earlier.pop("energy") <= energy <= later.pop("energy")
        rings = {**earlier.pop("samples"), **later.pop("samples")}
        assert len(samples) == 120
        assert samples == {stamp: rings[stamp] for stamp in samples}
        assert said == earlier == later


def test_both_simulators_change_alike(machine):
    m = machine(CHANGING)
    before = in_python(CHANGING, m.start_unix)
    done = m.python(str(DESCRIBE))
    after = in_python(CHANGING, m.start_unix)
    assert done.returncode == 0, done.stderr
    bursting, heating = zip(before, json.loads(done.stdout), after, strict=True)
    for earlier, said, later in (bursting, heating):
        assert earlier["energy"] <= said["energy"] <= later["energy"]
        rings = {**earlier["samples"], **later["samples"]}
        assert said["samples"] == {stamp: rings[stamp] for stamp in said["samples"]}
    assert len(set(bursting[1]["samples"].values())) > 20
    assert heating[0]["temperature"] <= heating[1]["temperature"] <= heating[2]["temperature"]


def test_every_gpu_has_said_something_of_its_own(machine):
    """Guards the test above: agreement on nothing would prove nothing."""
    busy, hot, failing, idle = in_python(EVERYTHING, time.time() - BEGAN_BEFORE)
    assert busy["utilization"] == 0.57
    assert busy["reasons"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert hot["pids"] == [7, 8]
    assert hot["temperature"] == 82
    assert failing["power"] == [None, 300]
    assert idle["reasons"] == ["gpu_idle"]


def test_a_lost_gpu_answers_that_it_is_lost(machine):
    m = machine("{gpus: 2, timeline: {1: [{at: 50, lost: true}]}}")
    said = m.answers("""
try: n.nvmlDeviceGetHandleByIndex(1)
except n.NVMLError_GpuIsLost: print("lost")""")
    assert said == "lost"


def test_a_driver_that_is_not_loaded_says_so(machine):
    m = machine("{gpus: 1, driver: [{at: 50, loaded: false}]}")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()")
    assert "NVMLError_DriverNotLoaded" in done.stderr


def test_a_connection_does_not_outlive_its_driver(machine):
    m = machine(f"{{gpus: 1, driver: [{{at: {BEGAN_BEFORE + 6}, loaded: false}}, {{at: {BEGAN_BEFORE + 7}}}]}}")
    said = m.answers("""
import time
codes = []
while 1 not in codes:
    try: codes.append(n.nvmlDeviceGetCount() and 0)
    except n.NVMLError as error: codes.append(error.value)
    time.sleep(0.05)
n.nvmlInit()
print(sorted(set(codes)), n.nvmlDeviceGetCount())""")
    assert said == f"{[0, 1, 9]} 1"  # success, uninitialized, driver not loaded


def test_an_xid_is_reported_once_and_only_if_it_happens_after_the_registration(machine):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 5, xid: 13}}, {{at: {BEGAN_BEFORE + 6}, xid: 79}}]}}}}")
    said = m.answers("""
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, events)
print(n.nvmlEventSetWait(events, 20000).eventData)
try: n.nvmlEventSetWait(events, 100)
except n.NVMLError_Timeout: print("no more")""")
    assert said.splitlines() == ["79", "no more"]


def test_a_struct_of_another_version_is_refused(machine):
    m = machine("gpus: 1")
    said = m.answers("""
print(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).total)
try: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2 + (1 << 24))
except n.NVMLError as error: print(error.value)""")
    assert said.splitlines() == [str(80 * 2**30), "25"]


def test_a_call_that_blocks_in_the_library_lets_other_threads_run(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, blocks: {nvmlDeviceGetTemperature: 3}}]}}")
    said = m.answers("""
import threading
blocked = threading.Thread(target=n.nvmlDeviceGetTemperature, args=(h, 0))
blocked.start()
n.nvmlDeviceGetPowerUsage(h)
print(blocked.is_alive())""")
    assert said == "True"


def test_a_symbol_that_is_not_simulated_is_a_function_that_the_driver_does_not_have(machine):
    said = machine("gpus: 1").answers("""
try: n.nvmlUnitGetCount()
except n.NVMLError_FunctionNotFound: print("not found")""")
    assert said == "not found"


def test_without_a_table_there_is_no_driver_and_the_variable_is_named(machine):
    m = machine("gpus: 1")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()", RANKSCOPE_NVML_TABLE=str(m.directory / "none"))
    assert "NVMLError_DriverNotLoaded" in done.stderr
    assert f"RANKSCOPE_NVML_TABLE={m.directory / 'none'}: No such file or directory" in done.stderr


def test_a_file_that_is_no_table_is_refused(machine):
    m = machine("gpus: 1")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()", RANKSCOPE_NVML_TABLE=__file__)
    assert "no table of a scenario" in done.stderr


def test_a_gpu_is_found_by_its_uuid(machine):
    m = machine("gpus: 3")
    said = m.answers(
        "print(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID('GPU-51300000-0000-4000-8000-000000000002')))"
    )
    assert said == "2"


def test_a_handle_that_the_library_did_not_give_is_refused(machine):
    m = machine("gpus: 1")
    said = m.answers("""
import ctypes
try: n.nvmlDeviceGetIndex(ctypes.cast(ctypes.c_void_p(4096), n.c_nvmlDevice_t))
except n.NVMLError_InvalidArgument: print("refused")""")
    assert said == "refused"


@pytest.mark.parametrize("key", ["follow_ranks: true", "processes_dir: /nowhere"])
def test_a_scenario_that_listens_to_the_outside_world_is_refused(machine, key):
    with pytest.raises(ScenarioError, match=key.split(":")[0]):
        machine(f"{{gpus: 1, {key}}}")


def test_the_library_exports_every_symbol_that_the_python_simulator_has(machine):
    m = machine("gpus: 1")
    library = ctypes.CDLL(str(m.directory / LIBRARY))
    with installed(SimulatedDriver(parse_scenario({"gpus": 1}))):
        symbols = [name for name in vars(pynvml.nvmlLib) if name.startswith("nvml")]
    assert len(symbols) > 20
    assert {name for name in symbols if not hasattr(library, name)} == ONLY_IN_PYTHON
