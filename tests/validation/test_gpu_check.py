"""gpu-check on simulated drivers: it compares every metric, and a part that fails or hangs affects no other part."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from docs.generate import Clock
from nvml_simulator import environment, install
from validation.gpu_check import __main__ as gpu_check
from validation.gpu_check import compare, faults, load, profiled, report, step_cost
from validation.gpu_check.exporter import Scrape
from validation.gpu_check.report import Check, judge

from rankscope_exporter.__main__ import REQUIRED
from rankscope_exporter.gpu.collector import Gpu, Tick
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.registry import EXPORTER_METRICS, GPU_COLLECTORS, GPU_METRICS
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import parse_scenario

ROOT = Path(__file__).parents[2]
DOCUMENT = (Path(__file__).parent / "nvidia_smi" / "h100.xml").read_text()


def serve(model: str) -> Scrape:
    """Return the exporter's series of a simulated GPU."""
    simulated = SimulatedDriver(parse_scenario({"gpus": 1, "model": model}), clock=Clock())
    with installed(simulated):
        driver = Driver()
        driver.connect()
        device = driver.device(0)
        readers = {collector: collector.reader() for collector in GPU_COLLECTORS}
        rounds = [{c: read(device, Tick(simulated.now(), 1.0)) for c, read in readers.items()} for _ in range(3)]
        driver.close()
    families = (family for c in GPU_COLLECTORS for family in c.families({Gpu(0, "GPU-1"): rounds[-1][c]}))
    samples = (sample for family in families for sample in family.samples)
    return Scrape(0.0, {(s.name, frozenset(s.labels.items())): s.value for s in samples})


def one(name: str, value: float, at: float = 0.0, **labels: str) -> Scrape:
    """Return a scrape of one series."""
    return Scrape(at, {(f"rankscope_{name}", frozenset({("gpu", "0"), *labels.items()})): value})


def compared(*scrapes: Scrape) -> dict[str, Check]:
    return {check.about: check for check in compare.compare_document("at rest", scrapes, DOCUMENT)}


def test_every_metric_is_compared_with_something() -> None:
    of_gpus = {row.metric for row in (*compare.ROWS, *load.EFFECTS)}
    invariant = {name for names in compare.INVARIANT.values() for name in names}
    declared = {metric.name.removeprefix("rankscope_") for metric in (*GPU_METRICS, *EXPORTER_METRICS)}
    assert {f"gpu_{name}" for name in of_gpus} | invariant == declared


def test_the_tables_name_metrics_and_labels_that_the_exporter_serves() -> None:
    served = [serve(model) for model in ("H100", "A100", "T4")]
    wanted = {(row.metric, labels) for row in compare.ROWS for labels in row.names}
    wanted |= {(effect.metric, effect.label) for effect in load.EFFECTS}
    found = {row for row in wanted for each in served if each.select(f"gpu_{row[0]}", *row[1].split())}
    # The first is absent before 4 GiB, the second without a process.
    assert wanted - found == {("pcie_bytes_total", "receive"), ("process_memory_bytes", "")}


@pytest.mark.parametrize(
    ("printed", "number"),
    [("81559 MiB", 81559 * 2**20), ("68.57 W", 68.57), ("-8 C", -8), ("1980 MHz", 1.98e9), ("2 us", 2e-6),
     ("9 bank(s)", 9), ("16x", 16), ("P8", 8), ("Yes", 1), ("150", 150), ("N/A", None), ("12 parsecs", None)],
)  # fmt: skip
def test_a_value_of_nvidia_smi_becomes_a_number_in_the_base_unit(printed: str, number: float | None) -> None:
    assert compare.quantity(printed) == pytest.approx(number)


def test_a_metric_is_compared_with_its_element() -> None:
    found = compared(one("gpu_temperature_celsius", 20), one("gpu_temperature_celsius", 40))
    assert found["at rest: temperature_celsius"] == Check("at rest: temperature_celsius", "ok", "20 … 40", "29")
    assert compared(one("gpu_temperature_celsius", 2))["at rest: temperature_celsius"].outcome == "differs"
    assert found["at rest: ecc_errors_total uncorrected sram"].reference == "5"  # a sum
    assert found["at rest: processes"].reference == "2"
    assert found["at rest: processes_memory_bytes"].reference == str(1500 * 2**20)
    assert found["at rest: retired_pages_total double_bit"].outcome == "absent"


def test_an_invariant_names_the_series_that_breaks_it() -> None:
    checks = compare.judge_invariants([one("exporter_collector_success", value, collector="xid") for value in (1, 0)])
    (broken,) = [check for check in checks if check.outcome == "differs"]
    assert "'xid'" in broken.note


def test_a_counter_must_grow_by_the_work_of_the_load() -> None:
    done = load.Done(load.FULL, began=100, ended=120, busy=19.9, bytes=0)
    counts = [one("gpu_busy_seconds_total", value, at) for at, value in ((90, 0), (99.5, 7), (122, 27), (130, 50))]
    outcomes = {check.about: check.outcome for check in load.judge_effects(done, counts)}
    assert outcomes["product: busy_seconds_total"] == "ok"
    assert outcomes["product: sm_active_seconds_total"] == "one side"
    assert next(load.judge_effects(done, [counts[1], counts[1]])).outcome == "differs"


def test_a_phase_counts_its_work() -> None:
    works, synchronized = load.make_works(torch, "cpu", size=8, chunk=1024), list[int]()
    done = load.run(load.Phase("phase", "copy", 0.02, on=0.01), works["copy"], lambda: synchronized.append(1))
    assert done.bytes == 1024 * load.BATCH * (len(synchronized) - 1)
    assert 0 < done.busy <= done.ended - done.began
    assert {phase.work for phase in load.PHASES} == works.keys()


@pytest.mark.parametrize(
    ("ours", "reference", "outcome"),
    [([1, 3], 2, "ok"), ([1, 3], 3.5, "ok"), ([1, 3], 4, "differs"), ([1], None, "one side"), ([], None, "absent")],
)
def test_a_reference_is_compared_with_the_range_of_our_values(
    ours: list[float], reference: float | None, outcome: str
) -> None:
    assert judge("value", ours, reference, tolerance=0.5).outcome == outcome


def test_the_report_shows_differences_first(tmp_path: Path) -> None:
    report.write(tmp_path / "r.json", {"GPU": "H100"}, {"part": [Check("a", "ok", "1", "1"), Check("b", "differs")]})
    page = (tmp_path / "r.md").read_text()
    assert "1 differs, 1 ok" in page
    assert page.index("| b | differs |") < page.index("| a | ok | 1 | 1 |")


def run_part(source: str, seconds: float = 60) -> list[Check]:
    """Run a part that prints a check and then runs the source."""
    first = """import time; print('{"about": "first", "outcome": "ok"}', flush=True)"""
    return gpu_check.run_part([sys.executable, "-c", f"{first}; {source}"], seconds)


def test_a_part_that_fails_keeps_its_checks() -> None:
    first, failed = run_part("raise OSError('no such thing')")
    assert (first, failed.outcome) == (Check("first", "ok"), "failed")
    assert "no such thing" in failed.note


def test_a_part_that_hangs_is_killed_and_keeps_its_checks() -> None:
    checks = run_part("time.sleep(600)", seconds=5)
    assert checks == [Check("first", "ok"), Check("this part", "failed", note="did not end in time. ")]


def run_command(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "validation.gpu_check", f"--json={directory}/report.json", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_a_part_runs_with_nvidia_smi_and_a_driver(tmp_path: Path) -> None:
    install(tmp_path, parse_scenario({"gpus": 1, "timeline": {0: [{"at": 0, "busy": 0.5}]}}))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{DOCUMENT}\nEND\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = run_command(tmp_path, "--only=driver_facts", PATH=path, **environment(tmp_path))
    assert ran.returncode == 0, ran.stderr
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["conditions"]["machine"].startswith("NVIDIA H100 80GB HBM3 driver 580.105.08, ")
    checks = {check["about"]: check for check in kept["parts"]["driver_facts"]}
    assert {check["outcome"] for check in checks.values()} == {"measured"}
    assert "µs apart" in checks["ring GPU_UTILIZATION"]["ours"]
    assert checks["nvmlDeviceGetUtilizationRates"]["ours"].endswith("µs")
    assert "<serial>" not in (tmp_path / "report.xml").read_text()


def test_without_a_gpu_there_is_one_line_that_says_so(tmp_path: Path) -> None:
    ran = run_command(tmp_path, PATH="/nowhere")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert ran.stderr.startswith("gpu-check: no NVIDIA GPU: ")


def test_a_missing_dependency_comes_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.REQUIRED == REQUIRED
    gpu_check.unpack_wheels(tmp_path, tmp_path)  # everything is installed
    monkeypatch.setattr(gpu_check, "REQUIRED", ("no_such_module",))
    with pytest.raises(gpu_check.WheelsError, match=r"no_such_module missing.*make gpu-wheels"):
        gpu_check.unpack_wheels(tmp_path, tmp_path)
    version = tmp_path / f"{sys.version_info.major}.{sys.version_info.minor}"
    version.mkdir()
    with zipfile.ZipFile(version / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("no_such_module.py", "")
    gpu_check.unpack_wheels(tmp_path / "unpacked", tmp_path)
    assert (tmp_path / "unpacked" / "no_such_module.py").exists()


@pytest.mark.parametrize("name", gpu_check.PARTS)
def test_every_part_has_a_module_with_checks(name: str) -> None:
    module, _, argument = name.partition(" ")
    assert callable(importlib.import_module(f"validation.gpu_check.{module}").check)
    assert argument != "again" or gpu_check.PARTS[name] < gpu_check.PARTS[module]


def test_what_differed_on_the_first_gpu_is_measured_again() -> None:
    page = (ROOT / "docs/measurements/gpu_check.md").read_text()
    differed = re.findall(r"^\| (\w[^|]*) \| differs \|", page, re.MULTILINE)
    assert len(differed) == 9
    cases = {f"{name}: finding" for name in faults.AGAIN}
    effects = {f"{effect.phase}: {effect.metric}" for effect in load.EFFECTS}
    phases = {phase.name for phase in load.AGAIN}
    at_rest = {f"at rest: {row.metric}" for row in compare.ROWS}
    assert set(differed) <= cases | at_rest | {one for one in effects if one.partition(": ")[0] in phases}
    assert {case.training for case in faults.CASES} >= set(faults.AGAIN)


@pytest.mark.parametrize("part", ["check_node", "mig", "timing", "gloo"])
def test_a_dry_run_ends_with_a_report(part: str, tmp_path: Path) -> None:
    ran = run_command(tmp_path, "--dry-run", "--only", part)
    assert ran.returncode == 0, ran.stderr
    (checks,) = json.loads((tmp_path / "report.json").read_text())["parts"].values()
    assert checks
    assert [check for check in checks if check["outcome"] == "failed"] == []


def kernel(begin: float, lasted: float, correlation: int) -> dict[str, object]:
    return {"cat": "kernel", "name": "gemm", "ts": begin, "dur": lasted, "args": {"correlation": correlation}}


def launched(at: float, correlation: int) -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": correlation}}


def phase(name: str, begin: float, lasted: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": lasted}


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    """The host runs ahead: all kernels run after both phases have ended there."""
    events = [
        phase("forward", 0, 10), phase("backward", 10, 10), launched(1, 1), launched(2, 2), launched(12, 3),
        kernel(100, 50, 1), kernel(160, 40, 2), kernel(200, 300, 3), kernel(900, 9, 4),
    ]  # fmt: skip
    assert profiled.phase_seconds(events) == pytest.approx({"forward": 100e-6, "backward": 300e-6})
    assert profiled.union(profiled.kernel_spans(events)) == pytest.approx(399e-6)


def test_kernels_at_the_same_time_count_once() -> None:
    assert profiled.union([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_busy_seconds_are_compared_with_the_kernels() -> None:
    counts = [one("gpu_busy_seconds_total", value) for value in (10, 16)]
    outcomes = [check.outcome for check in profiled.judge_busy(6.1, counts)]
    assert outcomes == ["ok", "one side"]
    assert next(profiled.judge_busy(12.0, counts)).outcome == "differs"


class Stub(step_cost.Worker):
    """A worker whose step takes this many seconds for each sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self, batch: int, steps: int) -> float:
        assert steps > 0
        return self.seconds * batch


def test_the_cost_of_the_hook_is_the_difference_of_interleaved_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "SECONDS", 0.0)
    step, hook, control = step_cost.compare(0.03, Stub(0.001), Stub(0.00101))
    assert (step.ours, step.note) == ("30.00 ms", "batch of 30, 40 steps a block")
    assert hook.ours == "+300 µs a step, +1.00%"
    assert control.ours == "+0 µs a step, +0.00%"
