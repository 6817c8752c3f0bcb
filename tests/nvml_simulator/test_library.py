"""The real pynvml loads the C library like NVIDIA's, and gets the same values as from the Python simulator."""

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
BEGAN_BEFORE = 100.0  # seconds: values that are constant since then are equal in both simulators

# Symbols that only the Python simulator has. To the exporter they are functions missing in an older driver.
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
        "nvmlDeviceGetMemoryBusWidth",
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
        "nvmlSystemGetNVMLVersion",
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


# Every sample period has a different share, and one GPU has just started to work, so it heats up.
BURSTS = [{"at": 60 + number * 0.37, "busy": number * 0.137 % 0.6, "waiting": 0.013} for number in range(400)]
CHANGING = yaml.safe_dump(
    {"gpus": 2, "timeline": {0: BURSTS, 1: [{"at": 0, "waiting": 0.3}, {"at": BEGAN_BEFORE - 5, "busy": 0.6}]}}
)


class Machine:
    """A directory with the library and a scenario that started earlier."""

    def __init__(self, directory: Path, scenario: Scenario) -> None:
        self.directory = directory
        self.start_unix = time.time() - BEGAN_BEFORE
        install(directory, scenario, self.start_unix)

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the library."""
        variables = {**os.environ, **environment(self.directory), **variables}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)

    def run_program(self, program: str) -> str:
        """Return the output of a program with initialized `pynvml` as n and GPU 0's handle as h."""
        begin = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        done = self.python("-c", begin + program)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    return lambda scenario: Machine(tmp_path, parse_scenario(yaml.safe_load(scenario)))


def describe_in_python(scenario: str, start_unix: float) -> list[dict[str, object]]:
    """Return the Python simulator's current values for a scenario that started at `start_unix`."""
    now = [start_unix]
    simulated = SimulatedDriver(parse_scenario(yaml.safe_load(scenario)), clock=lambda: now[0])
    now[0] = time.time()
    with installed(simulated):
        described: list[dict[str, object]] = runpy.run_path(str(DESCRIBE))["describe_all"]()
    return described


def test_both_simulators_have_the_same_values(machine):
    m = machine(EVERYTHING)
    before = describe_in_python(EVERYTHING, m.start_unix)
    done = m.python(str(DESCRIBE))
    after = describe_in_python(EVERYTHING, m.start_unix)
    assert done.returncode == 0, done.stderr
    for earlier, described, later in zip(before, json.loads(done.stdout), after, strict=True):
        energy, samples = described.pop("energy"), described.pop("samples")
        assert earlier.pop("energy") <= energy <= later.pop("energy")
        rings = {**earlier.pop("samples"), **later.pop("samples")}
        assert len(samples) == 120
        assert samples == {stamp: rings[stamp] for stamp in samples}
        assert described == earlier == later


def test_both_simulators_change_in_the_same_way(machine):
    m = machine(CHANGING)
    before = describe_in_python(CHANGING, m.start_unix)
    done = m.python(str(DESCRIBE))
    after = describe_in_python(CHANGING, m.start_unix)
    assert done.returncode == 0, done.stderr
    bursting, heating = zip(before, json.loads(done.stdout), after, strict=True)
    for earlier, described, later in (bursting, heating):
        assert earlier["energy"] <= described["energy"] <= later["energy"]
        rings = {**earlier["samples"], **later["samples"]}
        assert described["samples"] == {stamp: rings[stamp] for stamp in described["samples"]}
    assert len(set(bursting[1]["samples"].values())) > 20
    assert heating[0]["temperature"] <= heating[1]["temperature"] <= heating[2]["temperature"]


def test_every_gpu_of_the_scenario_is_different(machine):
    """Ensure that the comparison above covers values."""
    busy, hot, failing, idle = describe_in_python(EVERYTHING, time.time() - BEGAN_BEFORE)
    assert busy["utilization"] == 0.57
    assert busy["reasons"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert hot["pids"] == [7, 8]
    assert hot["temperature"] == 82
    assert failing["power"] == [None, 300]
    assert idle["reasons"] == ["gpu_idle"]


def test_a_lost_gpu_reports_that_it_is_lost(machine):
    m = machine("{gpus: 2, timeline: {1: [{at: 50, lost: true}]}}")
    output = m.run_program("""
try: n.nvmlDeviceGetHandleByIndex(1)
except n.NVMLError_GpuIsLost: print("lost")""")
    assert output == "lost"


def test_an_unloaded_driver_reports_it(machine):
    m = machine("{gpus: 1, driver: [{at: 50, loaded: false}]}")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()")
    assert "NVMLError_DriverNotLoaded" in done.stderr


def test_a_connection_ends_with_its_driver(machine):
    m = machine(f"{{gpus: 1, driver: [{{at: {BEGAN_BEFORE + 6}, loaded: false}}, {{at: {BEGAN_BEFORE + 7}}}]}}")
    output = m.run_program("""
import time
codes = []
while 1 not in codes:
    try: codes.append(n.nvmlDeviceGetCount() and 0)
    except n.NVMLError as error: codes.append(error.value)
    time.sleep(0.05)
n.nvmlInit()
print(sorted(set(codes)), n.nvmlDeviceGetCount())""")
    assert output == f"{[0, 1, 9]} 1"  # success, uninitialized, driver not loaded


def test_an_xid_is_reported_once_and_only_after_registration(machine):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 5, xid: 13}}, {{at: {BEGAN_BEFORE + 6}, xid: 79}}]}}}}")
    output = m.run_program("""
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, events)
print(n.nvmlEventSetWait(events, 20000).eventData)
try: n.nvmlEventSetWait(events, 100)
except n.NVMLError_Timeout: print("no more")""")
    assert output.splitlines() == ["79", "no more"]


def test_an_unknown_struct_version_is_rejected(machine):
    m = machine("gpus: 1")
    output = m.run_program("""
print(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).total)
try: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2 + (1 << 24))
except n.NVMLError as error: print(error.value)""")
    assert output.splitlines() == [str(80 * 2**30), "25"]


def test_a_blocking_library_call_does_not_block_other_threads(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, blocks: {nvmlDeviceGetTemperature: 3}}]}}")
    output = m.run_program("""
import threading
blocked = threading.Thread(target=n.nvmlDeviceGetTemperature, args=(h, 0))
blocked.start()
n.nvmlDeviceGetPowerUsage(h)
print(blocked.is_alive())""")
    assert output == "True"


def test_a_missing_symbol_is_an_unsupported_function(machine):
    output = machine("gpus: 1").run_program("""
try: n.nvmlUnitGetCount()
except n.NVMLError_FunctionNotFound: print("not found")""")
    assert output == "not found"


def test_without_a_table_the_driver_is_not_loaded_and_the_variable_is_named(machine):
    m = machine("gpus: 1")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()", RANKSCOPE_NVML_TABLE=str(m.directory / "none"))
    assert "NVMLError_DriverNotLoaded" in done.stderr
    assert f"RANKSCOPE_NVML_TABLE={m.directory / 'none'}: No such file or directory" in done.stderr


def test_a_file_that_is_not_a_table_is_rejected(machine):
    m = machine("gpus: 1")
    done = m.python("-c", "import pynvml; pynvml.nvmlInit()", RANKSCOPE_NVML_TABLE=__file__)
    assert "not a scenario table" in done.stderr


def test_a_gpu_is_found_by_its_uuid(machine):
    m = machine("gpus: 3")
    output = m.run_program(
        "print(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID('GPU-51300000-0000-4000-8000-000000000002')))"
    )
    assert output == "2"


def test_an_unknown_handle_is_rejected(machine):
    m = machine("gpus: 1")
    output = m.run_program("""
import ctypes
try: n.nvmlDeviceGetIndex(ctypes.cast(ctypes.c_void_p(4096), n.c_nvmlDevice_t))
except n.NVMLError_InvalidArgument: print("refused")""")
    assert output == "refused"


@pytest.mark.parametrize(
    "key", ["follow_ranks: true", "processes_dir: /nowhere", "models: {0: T4}", "timeline: {0: [{at: 0, speed: 0.5}]}"]
)
def test_a_scenario_that_a_table_cannot_represent_is_rejected(machine, key):
    with pytest.raises(ScenarioError, match=key.partition("speed")[1] or key.split(":")[0]):
        machine(f"{{gpus: 1, {key}}}")


def test_the_library_exports_every_symbol_of_the_python_simulator(machine):
    m = machine("gpus: 1")
    library = ctypes.CDLL(str(m.directory / LIBRARY))
    with installed(SimulatedDriver(parse_scenario({"gpus": 1}))):
        symbols = [name for name in vars(pynvml.nvmlLib) if name.startswith("nvml")]
    assert len(symbols) > 20
    assert {name for name in symbols if not hasattr(library, name)} == ONLY_IN_PYTHON
