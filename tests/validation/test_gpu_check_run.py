"""gpu-check as a command: with the C simulator and an nvidia-smi of ours, and where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from nvml_simulator import LIBRARY, environment, install
from validation.gpu_check import wheels

from rankscope_exporter.__main__ import REQUIRED
from rankscope_exporter.simulation import simulated_uuid
from rankscope_exporter.simulation.scenario import parse_scenario

DOCUMENT = Path(__file__).parent / "nvidia_smi" / "h100.xml"
LOAD = "--load=--device=cpu --matrix=8 --chunk=1024 --held=1024"


def gpu_check(directory: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, with the report in that directory."""
    command = [sys.executable, "-m", "validation.gpu_check", f"--json={directory}/report.json", "--scale=0.01", LOAD]
    command += flags
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def put_nvidia_smi(directory: Path) -> str:
    """One that shows the recorded GPU under the simulated one's UUID; the PATH to find it by."""
    xml = DOCUMENT.read_text().replace("GPU-00000000-0000-0000-0000-000000000001", simulated_uuid(0))
    (directory / "document.xml").write_text(xml)
    command = directory / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat {directory}/document.xml\n")
    command.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def test_every_part_reports_and_nothing_stops_it(tmp_path: Path) -> None:
    scenario = yaml.safe_load("{gpus: 1, timeline: {0: [{at: 0, busy: 0.5}]}}")
    install(tmp_path, parse_scenario(scenario))
    ran = gpu_check(tmp_path, PATH=put_nvidia_smi(tmp_path), **environment(tmp_path))
    assert ran.returncode == 0, ran.stderr
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert [check for check in checks if check["outcome"] == "failed"] == []
    parts = Counter(check["part"] for check in checks)
    assert parts.keys() >= {"nvidia-smi, at rest", "nvidia-smi, under load", "known load", "held at every scrape"}
    assert parts.keys() >= {"facts about the driver", "cost of the driver's calls", "cost of the exporter", "as nobody"}
    outcomes = {(check["part"], check["about"]): check["outcome"] for check in checks}
    assert outcomes["nvidia-smi, at rest", "power_limit_watts"] == "ok"
    assert outcomes["nvidia-smi, at rest", "temperature_celsius"] == "differs"
    assert outcomes["known load", "all the time: state_seconds_total"] == "ok"
    assert outcomes["known load", "warnings and errors logged"] == "ok"
    assert "# gpu_check" in (tmp_path / "report.md").read_text()
    assert "<nvidia_smi_log>" in (tmp_path / "report.xml").read_text()
    assert "rankscope_gpu_up" in (tmp_path / "report.prom").read_text()


def test_a_part_can_be_had_alone(tmp_path: Path) -> None:
    install(tmp_path, parse_scenario({"gpus": 1}))
    ran = gpu_check(tmp_path, "--only=hook", PATH=put_nvidia_smi(tmp_path), **environment(tmp_path))
    assert ran.returncode == 0, ran.stderr
    (check,) = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert (check["part"], check["outcome"]) == ("hook on the GPU", "skipped")


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    ran = gpu_check(tmp_path, PATH="/nowhere")
    assert (ran.returncode, ran.stderr) == (2, "gpu-check: no NVIDIA GPU here: there is no nvidia-smi on the PATH\n")


def test_with_nvidia_smi_and_without_a_driver_too(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).touch()  # no library: it would be found before a real one
    ran = gpu_check(tmp_path, PATH=put_nvidia_smi(tmp_path), LD_LIBRARY_PATH=str(tmp_path))
    assert (ran.returncode, ran.stderr) == (2, "gpu-check: no NVIDIA GPU here: NVML Shared Library Not Found\n")


def test_what_is_fetched_is_what_the_exporter_asks_for() -> None:
    assert tuple(wheels.IMPORTS) == REQUIRED


def test_nothing_is_unpacked_where_everything_is_installed(tmp_path: Path) -> None:
    assert wheels.provide(tmp_path) is None


def test_a_missing_dependency_comes_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wheels.IMPORTS, "there_is_no_such_module", "none")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / version).mkdir()
    with zipfile.ZipFile(tmp_path / version / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("there_is_no_such_module.py", "")
    unpacked = wheels.provide(tmp_path)
    assert unpacked is not None
    assert (unpacked / "there_is_no_such_module.py").exists()


def test_without_wheels_it_says_how_to_come_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wheels.IMPORTS, "there_is_no_such_module", "none")
    with pytest.raises(wheels.WheelsError, match=r"there_is_no_such_module missing.*make gpu-wheels"):
        wheels.provide(tmp_path)
