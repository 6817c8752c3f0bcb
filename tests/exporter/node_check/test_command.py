"""`rankscope check-node` as a command: faults of simulated GPUs, loads that break, and exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rankscope.cli import launch
from rankscope_exporter.child import Child
from rankscope_exporter.node_check import command, load
from rankscope_exporter.node_check.command import CheckRequest, check, exit_status, show
from rankscope_exporter.node_check.host_checks import Host
from rankscope_exporter.node_check.result import Result

FAULTS = {
    0: [{"at": 0, "speed": 0.6}],
    1: [{"at": 0, "throttle": ["hw_thermal_slowdown"]}],
    2: [{"at": 0, "pcie_generation": 1, "pcie_width": 8}],
    3: [{"at": 0, "nvlinks_down": 2}],
    4: [{"at": 0, "fields": {144: 1}}],
    5: [{"at": 0}, {"at": 1.5, "xid": 79}],
    6: [{"at": 0}, {"at": 1.5, "lost": True}],
    7: [{"at": 0, "lost": True}],
    8: [{"at": 0, "processes": [{"pid": 4711, "memory": "8 GiB"}]}],
    9: [{"at": 0, "temperature": 90, "persistence": False}],
    10: [{"at": 0, "ecc": {"uncorrected_dram": 1}, "fields": {230: 1}}],
}
"""By GPU of a scenario; all others are healthy."""


ECC = r"torch.AcceleratorError: CUDA error: uncorrectable ECC error\nCompile with TORCH_USE_CUDA_DSA to enable it.\n"


@pytest.fixture(autouse=True)
def _healthy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the machine that runs the tests, whose clock or ports may have a fault."""
    monkeypatch.setattr(command, "read_host", lambda _: Host())
    monkeypatch.setattr(command, "read_xids", list)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_SCRIPT_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


def scenario(directory: Path, timeline: Mapping[int, object] | None = None, gpus: int = 3, **keys: object) -> str:
    path = directory / "scenario.yml"
    path.write_text(yaml.safe_dump({"gpus": gpus, "timeline": timeline or {}, **keys}))
    return str(path)


def results_of(simulate: str, environ: Mapping[str, str] | None = None, **request: Any) -> list[Result]:
    return check(CheckRequest(simulate=simulate, **request), environ or {})[0]


def wrong(results: list[Result]) -> dict[int | None, set[str]]:
    """Return the checks that fail, warn or find a process, by GPU."""
    found: dict[int | None, set[str]] = {}
    for result in results:
        if result.outcome not in ("ok", "not_run"):
            found.setdefault(result.gpu, set()).add(result.check)
    return found


def test_every_fault_of_a_simulated_gpu_is_found_where_it_is(tmp_path: Path) -> None:
    results = results_of(scenario(tmp_path, FAULTS, gpus=14, model="A100"))
    assert wrong(results) == {
        0: {"sm_clock", "matmul", "memory_bandwidth"},
        1: {"sm_clock", "matmul", "throttling"},
        2: {"pcie"},
        3: {"nvlink"},
        4: {"row_remapping"},
        5: {"xid"},
        6: {"gpu"},
        7: {"gpu"},
        8: {"in_use"},
        9: {"temperature", "persistence_mode"},
        10: {"ecc", "recovery_action"},
    }
    assert exit_status(results, 14) == 1


def test_idle_gpus_of_two_models_one_of_them_split_are_healthy(tmp_path: Path) -> None:
    models = {index: {"like": "T4"} for index in (3, 4, 5)} | {6: {"like": "A100", "mig": ["3g.20gb"]}}
    results = results_of(scenario(tmp_path, gpus=7, models=models))
    assert wrong(results) == {}
    assert {r.measured for r in results if r.gpu == 6 and r.check == "matmul"} == {"MIG is enabled"}
    assert "85% of the median of 3 GPUs" in next(r.expected for r in results if r.gpu == 3 and r.check == "matmul")


def test_only_the_job_s_gpus_are_checked_and_a_missing_one_fails(tmp_path: Path) -> None:
    simulate = scenario(tmp_path, {0: FAULTS[7], 2: FAULTS[8]})
    assert wrong(results_of(simulate, {"CUDA_VISIBLE_DEVICES": "1"})) == {}
    assert wrong(results_of(simulate, gpus="1,5")) == {None: {"gpu"}}


def fake_python(directory: Path, behavior: str) -> str:
    """Write an interpreter that behaves so for the GPU `$CUDA_VISIBLE_DEVICES`, instead of the load."""
    path = directory / "python"
    rates = """echo '{"rate": "matmul", "value": 1e15, "began": 1, "ended": 2}'"""
    stage = """echo "{\\"stage\\": \\"$1\\", \\"began\\": $(cut -d' ' -f1 /proc/uptime)}\""""
    path.write_text(f"#!/bin/sh\nstage() {{ {stage}; }}\nrates() {{ {rates}; }}\n{behavior}\n")
    path.chmod(0o755)
    return str(path)


def loads(directory: Path, behavior: str) -> dict[int | None, tuple[str, str]]:
    """Return outcome and text of the load of each of three GPUs."""
    python = fake_python(directory, behavior)
    results = results_of(scenario(directory, {i: [{"at": 0, "busy": 1}] for i in range(3)}), python=python)
    return {result.gpu: (result.outcome, result.measured) for result in results if result.check == "load"}


def test_a_load_that_hangs_on_one_gpu_fails_there_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LOAD_WITHIN", 3.0)
    monkeypatch.setattr(command, "HANGS_AFTER", 1.0)
    hang = "case $CUDA_VISIBLE_DEVICES in *1) trap '' TERM; sleep 1000;; *) rates;; esac"
    found = loads(tmp_path, f"stage 'importing torch'; stage matmul; {hang}")
    assert found[1][0] == "failed"
    assert found[1][1].startswith("matmul: no end after")
    assert found[0][0] == found[2][0] == "ok"


def test_a_load_that_is_late_because_torch_was_slow_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LOAD_WITHIN", 2.0)
    found = loads(tmp_path, "stage 'importing torch'; stage matmul; sleep 1000")
    assert {outcome for outcome, _ in found.values()} == {"not_run"}


@pytest.mark.parametrize(
    ("behavior", "outcome", "text"),
    [
        ('echo \'{"not_run": "torch 2.13 has no CUDA"}\'', "not_run", "torch 2.13 has no CUDA"),
        ("stage 'importing torch'; exit 1", "not_run", "importing torch: exit status 1"),
        ("echo no such thing >&2; exit 1", "not_run", "starting Python: no such thing"),
        (
            "stage matmul; echo 'RuntimeError: CUDA error: uncorrectable ECC error' >&2; exit 1",
            "failed",
            "uncorrectable",
        ),
        (f"stage matmul; printf '{ECC}' >&2; exit 1", "failed", "matmul: torch.AcceleratorError: CUDA error: unc"),
        ("stage matmul; kill -9 $$", "not_run", "exit status -9"),
        ("stage matmul; echo 'the NVIDIA driver on your system is too old' >&2; exit 1", "not_run", "too old"),
        ("stage matmul; echo 'torch.OutOfMemoryError: CUDA out of memory' >&2; exit 1", "not_run", "out of memory"),
    ],
)
def test_only_an_error_of_the_gpu_fails_and_not_one_of_torch(
    tmp_path: Path, behavior: str, outcome: str, text: str
) -> None:
    found = loads(tmp_path, behavior)[0]
    assert found[0] == outcome
    assert text in found[1]


def test_without_torch_the_checks_under_load_are_not_run_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = fake_python(tmp_path, 'echo \'{"not_run": "torch cannot be imported"}\'')
    assert show(CheckRequest(simulate=scenario(tmp_path), python=python), {}) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "not run sm_clock, matmul, memory_bandwidth, throttling, pcie: torch cannot be imported"
    assert out[-1].startswith("rankscope check-node: ok (3 GPUs, ")


def test_a_driver_that_does_not_answer_fails_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FACTS_WITHIN", 3.0)
    simulate = scenario(tmp_path, {1: [{"at": 0, "blocks": {"nvmlDeviceGetPersistenceMode": 1000}}]})
    found = wrong(results_of(simulate))
    assert found == {1: {"gpu"}}


def test_a_value_that_the_driver_fails_to_report_fails_nothing(tmp_path: Path) -> None:
    calls = ("PersistenceMode", "Temperature", "MemoryErrorCounter", "ComputeRunningProcesses_v3", "CurrPcieLinkWidth")
    fails = {f"nvmlDeviceGet{call}": "UNKNOWN" for call in calls}
    assert wrong(results_of(scenario(tmp_path, {0: [{"at": 0, "fails": fails}]}))) == {}


def test_a_gpu_that_may_not_be_opened_fails_nothing(tmp_path: Path) -> None:
    denied = {"nvmlDeviceGetHandleByIndex_v2": "NO_PERMISSION"}
    assert wrong(results_of(scenario(tmp_path, {0: [{"at": 0, "fails": denied}]}))) == {}


@pytest.mark.parametrize(
    ("outcomes", "count", "is_strict", "status"),
    [
        (["ok", "not_run", "warning"], 1, False, 0),
        (["ok", "warning"], 1, True, 1),
        (["ok", "in_use"], 1, False, 3),
        (["in_use", "failed"], 1, False, 1),
        (["ok"], 0, False, 2),
        (["failed"], 0, False, 1),
    ],
)
def test_the_exit_status_is_that_of_the_worst_result(
    outcomes: list[Any], count: int, is_strict: bool, status: int
) -> None:
    assert exit_status([Result("check", one) for one in outcomes], count, is_strict=is_strict) == status


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        launch.main(["check-node", *arguments])
    return int(str(ended.value.code))


def test_a_process_on_a_gpu_has_its_own_exit_status_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--simulate", scenario(tmp_path, {1: FAULTS[8]})) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "used by process 4711" in lines[0]
    assert lines[0].startswith("IN USE  GPU 1 (GPU-51300000-")
    assert "a GPU is in use" in lines[-1]


def test_json_has_every_check_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--json", "--simulate", scenario(tmp_path, {0: FAULTS[4]})) == 1
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)
    assert (value["exit_status"], value["gpus"]) == (1, 3)
    assert [r["check"] for r in value["results"] if r["outcome"] == "failed"] == ["row_remapping"]
    assert [r["check"] for r in value["results"] if r["advice"]] == ["row_remapping"]


@pytest.mark.parametrize(
    "arguments", [["--gpus=first"], ["--simulate=/nowhere"], ["--simulate=0"], ["--simulate=1", "--python=/nowhere"]]
)
def test_wrong_use_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Errno" not in error


def test_a_negative_number_of_workers_is_a_wrong_command_line() -> None:
    assert run_command("--simulate=1", "--workers=-3") == 2


def test_relative_paths_are_those_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario(tmp_path, {1: FAULTS[4]})
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    found = results_of("scenario.yml", python="./python")
    assert wrong(found)[1] == {"row_remapping"}
    assert "No such file" not in " ".join(result.measured for result in found)


def test_a_job_without_a_gpu_says_which_variable_hides_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(CheckRequest(simulate="2"), {"CUDA_VISIBLE_DEVICES": ""}) == 2
    assert "not run gpu: CUDA_VISIBLE_DEVICES names no GPU" in capsys.readouterr().out


def test_a_node_without_a_gpu_has_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--gpus=all") == 2
    assert "nothing checked: no GPU" in capsys.readouterr().out


def test_a_gpu_that_is_asked_for_on_a_node_without_a_driver_fails() -> None:
    assert run_command("--gpus=0") == 1


def test_a_broken_reader_says_nothing_about_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "READER", (sys.executable, "-c", "raise SystemExit('no module')"))
    results, count = check(CheckRequest(gpus="0"), {})
    assert (wrong(results), count) == ({}, 0)
    assert next(r.measured for r in results if r.check == "driver") == "reading failed: no module"


@pytest.mark.parametrize(
    ("driver", "outcome"),
    [
        ({"error": "Driver/library version mismatch", "is_mismatch": True}, "failed"),
        ({"error": "Shared Library Not Found", "is_mismatch": False}, "not_run"),
        ({"count": 0, "version": "580.159.04", "library": "13.580.159.04"}, "ok"),
        ({"count": 0, "version": "580.159.04", "library": "13.575.51"}, "warning"),
    ],
)
def test_library_and_kernel_module_must_be_of_one_version(
    monkeypatch: pytest.MonkeyPatch, driver: object, outcome: str
) -> None:
    monkeypatch.setattr(command, "READER", (sys.executable, "-c", f"print({json.dumps({'driver': driver})!r})"))
    results, count = check(CheckRequest(gpus="all"), {})
    assert [(result.check, result.outcome) for result in results[:1]] == [("driver", outcome)]
    assert count == 0


def test_the_load_says_that_this_torch_has_no_cuda() -> None:
    ran = subprocess.run([sys.executable, load.__file__, "1"], capture_output=True, text=True, check=True, cwd="/")
    assert f"torch {torch.__version__} has no CUDA" in ran.stdout


def test_the_load_measures_operations_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    works = load.make_works(torch, "cpu", torch.float32, 2**16, 16)
    assert sum(share for share, _, _ in works.values()) == pytest.approx(1.0)
    for name, (_, work, amount) in works.items():
        load.measure(name, 0.05, work, amount, lambda: None)
    rates = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [rate["rate"] for rate in rates] == ["matmul", "memory_bandwidth", "upload"]
    assert all(rate["value"] > 0 and rate["began"] < rate["ended"] <= time.monotonic() for rate in rates)


def test_a_child_does_not_import_from_the_directory_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise SystemExit('imported from here')")
    monkeypatch.chdir(tmp_path)
    with Child(command.READER) as child:
        assert child.wait(time.monotonic() + 20, lambda: bool(child.lines))
        assert "driver" in child.lines[0]


def test_every_default_limit_ends_within_a_minute() -> None:
    assert command.FACTS_WITHIN + command.LOAD_WITHIN < 60
