"""A second simulator: a small `libnvidia-ml.so.1` in C that any program loads instead of NVIDIA's.

It uses the same scenario files as rankscope_exporter.simulation, which works below pynvml in one process and is for
users. This one is for tests and benchmarks: it covers the ABI, struct versions and the release of the GIL, and lets
other exporters run on the same simulated GPUs. table.py writes the scenario to a file that the library maps.

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
    """Build the library in the directory and write the scenario next to it. It starts at `start_unix`, by default now.

    Raises ScenarioError if a table cannot represent the scenario, CalledProcessError if `cc` fails.
    """
    table = scenario_table(scenario, time.time() if start_unix is None else start_unix)
    (directory / TABLE).write_bytes(table)
    command: list[str | Path] = [*COMPILER, "-o", directory / LIBRARY, *SOURCES, "-lm", "-lpthread"]
    subprocess.run(command, check=True)  # noqa: S603  # a fixed command on files of this folder


def environment(directory: Path) -> dict[str, str]:
    """Return the variables with which a program loads this library instead of NVIDIA's, and the library the table."""
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("LD_LIBRARY_PATH")]))
    return {"LD_LIBRARY_PATH": path, "RANKSCOPE_NVML_TABLE": str(directory / TABLE)}
