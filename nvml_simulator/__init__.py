"""The second simulator: a small `libnvidia-ml.so.1` in C that any program loads in the place of NVIDIA's.

It follows the same scenario files as rankscope_exporter.simulation, which sits under pynvml in one process and is what
users get. This one exists for tests and benchmarks: it exercises the ABI, struct versions and the release of the GIL,
and lets other exporters run on the same simulated GPUs. table.py writes the scenario as a file that the library maps.

    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory), load_scenario("scenario.yml"))
        subprocess.run(["rankscope-exporter"], env={**os.environ, **environment(Path(directory))})
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from nvml_simulator.table import scenario_table
from rankscope_exporter.simulation.scenario import Scenario

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.c")))
LIBRARY = "libnvidia-ml.so.1"
TABLE = "scenario.table"
COMPILER = ("cc", "-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")


def install(directory: Path, scenario: Scenario, start_unix: float | None = None) -> None:
    """Build the library there and write the scenario beside it; it begins at `start_unix`, now by default.

    Raises ScenarioError if the scenario needs what a table cannot hold, CalledProcessError if `cc` fails.
    """
    table = scenario_table(scenario, time.time() if start_unix is None else start_unix)
    (directory / TABLE).write_bytes(table)
    command: list[str | Path] = [*COMPILER, "-o", directory / LIBRARY, *SOURCES, "-lm", "-lpthread"]
    subprocess.run(command, check=True)  # noqa: S603  # a fixed command on files of this folder


def environment(directory: Path) -> dict[str, str]:
    """The variables with which a program finds the library before NVIDIA's, and the library its scenario."""
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("LD_LIBRARY_PATH")]))
    return {"LD_LIBRARY_PATH": path, "RANKSCOPE_NVML_TABLE": str(directory / TABLE)}
