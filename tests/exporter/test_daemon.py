"""The daemon as a process: starts without a driver, finds one later, and reports invalid flags."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from testing.exporter_process import EXPORTER, eventually, exporter, exporter_process, metrics, status
from testing.records import publish, rank_info
from tests.exporter.gpu.allocation.kubelet import Kubelet

from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from rankscope_exporter import daemon, logs
from rankscope_exporter.__main__ import main
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.simulation import simulated_uuid


@pytest.fixture
def start_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that returns the line with which the exporter rejects some flags."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)

    def error(*flags: str) -> str:
        with pytest.raises(SystemExit, match=r"^2$"):
            main(flags)
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert printed.out == ""
        return line

    return error


def test_without_a_driver_the_exporter_is_ready_and_reports_the_driver_as_down(run_dir: Path, free_port: int) -> None:
    with exporter(free_port, f"--run-dir={run_dir}") as url:
        eventually(lambda: status(f"{url}/-/ready") == 200)
        lines = metrics(url)
        assert "rankscope_exporter_nvml_up 0.0" in lines
        assert "rankscope_exporter_gpus_seen 0.0" in lines
        assert not [line for line in lines if line.startswith("rankscope_gpu_")]


def test_each_page_has_the_exporters_time(run_dir: Path, free_port: int) -> None:
    with exporter(free_port) as url:
        for _ in range(2):
            before = time.time()
            (exported,) = (
                line.split(" ")[1] for line in metrics(url) if line.startswith("rankscope_exporter_time_seconds ")
            )
            assert before <= float(exported) <= time.time()


def test_a_driver_that_is_loaded_later_is_found(run_dir: Path, free_port: int) -> None:
    scenario = run_dir / "scenario.yml"
    scenario.write_text("gpus: 2\ndriver:\n  - {at: 0, loaded: false}\n  - {at: 10, loaded: true}\n")
    with exporter(free_port, f"--run-dir={run_dir}", f"--simulate={scenario}") as url:
        assert "rankscope_exporter_nvml_up 0.0" in metrics(url)
        eventually(lambda: "rankscope_exporter_gpus_seen 2.0" in metrics(url))
        assert "rankscope_exporter_nvml_up 1.0" in metrics(url)


def test_the_simulation_is_imported_only_with_the_flag(
    run_dir: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # the log names every module that is imported
    for flags, imports in (["--simulate=1"], True), ([], False):
        log = run_dir / "log"
        with log.open("w") as stderr, exporter_process(free_port, *flags, stderr=stderr):
            metrics(f"http://127.0.0.1:{free_port}")
        lines = log.read_text()
        assert "rankscope_exporter.daemon" in lines
        assert ("rankscope_exporter.simulation" in lines) == imports


def test_gpus_have_the_node_name_of_the_flag(run_dir: Path, free_port: int) -> None:
    with exporter(free_port, "--simulate=1", f"--run-dir={run_dir}", "--node=gpu-node-7") as url:
        eventually(lambda: status(f"{url}/-/ready") == 200)
        (info,) = (line for line in metrics(url) if line.startswith("rankscope_gpu_info{"))
        assert 'node="gpu-node-7"' in info


def test_a_disabled_collector_exports_nothing(run_dir: Path, free_port: int) -> None:
    flags = ("--simulate=1", f"--run-dir={run_dir}", "--no-collector.memory", "--no-collector.xid")
    with exporter(free_port, *flags) as url:
        eventually(lambda: status(f"{url}/-/ready") == 200)
        names = {line.split("{")[0] for line in metrics(url)}
        assert "rankscope_gpu_power_watts" in names
        assert not [name for name in names if "gpu_memory_total" in name or "xid" in name]


def test_an_invalid_rank_file_does_not_affect_other_ranks(run_dir: Path, free_port: int) -> None:
    (run_dir / "half.rank").write_bytes(b"RANKSCOP")
    with exporter(free_port, f"--run-dir={run_dir}") as url:
        lines = metrics(url)
        assert 'rankscope_exporter_rank_files_skipped{reason="truncated"} 1.0' in lines
        assert 'rankscope_exporter_collector_success{collector="ranks"} 1.0' in lines


def write_steps(run_dir: Path, rank: int) -> RankWriter:
    """Write the record of a rank that lives in this process, with five steps of one second each."""
    now = time.monotonic() - 10.0  # of the past: a machine may have been up for less than any constant
    writer = RankWriter()
    timeline = Timeline(writer, lambda: now)
    writer.publish(run_dir, f"r.{rank}", rank_info(rank=str(rank), group="0-1"))
    for _ in range(5):
        now += 1.0
        timeline.step()
    return writer


def test_steps_are_aligned_and_processes_read(run_dir: Path, free_port: int) -> None:
    writers = [write_steps(run_dir, rank) for rank in range(2)]
    with exporter(free_port, f"--run-dir={run_dir}") as url:
        eventually(
            lambda: f'rankscope_rank_aligned_steps_total{{owner="{os.getuid()}",rank="1",run="r"}} 4.0' in metrics(url)
        )
        names = {line.split("{")[0] for line in metrics(url)}
    assert {"rankscope_rank_cpu_seconds_total", "rankscope_rank_blame_seconds_total"} <= names
    assert writers


def test_the_disabled_alignment_collector_exports_nothing(run_dir: Path, free_port: int) -> None:
    writers = [write_steps(run_dir, rank) for rank in range(2)]
    with exporter(free_port, f"--run-dir={run_dir}", "--no-collector.alignment") as url:
        names = {line.split("{")[0] for line in metrics(url)}
    assert "rankscope_rank_steps_total" in names
    assert "rankscope_rank_aligned_steps_total" not in names
    assert writers


FAULTS = """
gpus: 2
timeline:
  0: [{at: 0, busy: 1}]
  1: [{at: 0, busy: 0.5}, {at: 8, xid: 79, lost: true}, {at: 11, lost: false}]
driver: [{at: 20, loaded: false}, {at: 23, loaded: true}]
"""


def test_a_lost_gpu_and_an_unloaded_driver_recover_without_a_restart(run_dir: Path, free_port: int) -> None:
    (run_dir / "scenario.yml").write_text(FAULTS)
    with exporter(free_port, f"--run-dir={run_dir}", f"--simulate={run_dir / 'scenario.yml'}") as url:
        eventually(lambda: all("tensor_active_seconds_total" in series(url, gpu) for gpu in (0, 1)))  # two readings
        before = series(url, 1)
        eventually(lambda: up(url) == [1, 0])
        assert series(url, 1) == {"up", "xid_errors_total", "xid_last_timestamp_seconds"}
        assert series(url, 0) >= before, "the other GPU keeps all its series"
        eventually(lambda: up(url) == [1, 1])
        assert series(url, 1) - {"xid_last_timestamp_seconds"} <= before
        eventually(lambda: series(url, 1) >= before)
        busy = busy_seconds(url)
        eventually(lambda: up(url) == [0, 0])
        assert [series(url, gpu) for gpu in (0, 1)] == [
            {"up", "xid_errors_total"},
            {"up", "xid_errors_total", "xid_last_timestamp_seconds"},
        ]
        assert "rankscope_exporter_nvml_up 0.0" in metrics(url)
        eventually(lambda: up(url) == [1, 1])
        assert all(later >= earlier for later, earlier in zip(busy_seconds(url), busy, strict=True))
        assert not [line for line in metrics(url) if line.endswith("NaN")]


def test_the_page_and_the_api_have_what_alerts_about_a_gpu(run_dir: Path, free_port: int) -> None:
    (run_dir / "scenario.yml").write_text("{gpus: 2, timeline: {1: [{at: 8, xid: 48}]}}")
    flags = f"--run-dir={run_dir}", f"--simulate={run_dir / 'scenario.yml'}", "--node=node-a"
    with exporter(free_port, *flags) as url:
        assert read(f"{url}/").count("<title>No problem · node-a · Rankscope exporter</title>") == 1
        eventually(lambda: problems(url))
        (problem,) = problems(url)
        assert problem["sentence"] == "XID 48 on GPU 1 of node-a: a fault of hardware or firmware"
        assert (problem["severity"], problem["gpu"], problem["remaining_seconds"]) == ("critical", "1", 0.0)
        assert problem["sentence"] in read(f"{url}/")
        eventually(lambda: 'aria-label="busy 0% to 0% in the last 10 min"' in read(f"{url}/"))


def problems(url: str) -> list[dict[str, Any]]:
    return list(json.loads(read(f"{url}/api/v1/runs"))["gpu_problems"])


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def series(url: str, gpu: int) -> set[str]:
    """Return the names of the GPU's series, without the prefix."""
    found = (re.match(rf'rankscope_gpu_(\w+){{gpu="{gpu}"', line) for line in metrics(url))
    return {match[1] for match in found if match}


def up(url: str) -> list[float]:
    return [float(line.split()[-1]) for line in metrics(url) if line.startswith("rankscope_gpu_up{")]


def busy_seconds(url: str) -> list[float]:
    return [float(line.split()[-1]) for line in metrics(url) if line.startswith("rankscope_gpu_busy_seconds_total{")]


ALLOCATED = f"""
gpus: 4
timeline:
  0: [{{at: 0, busy: 1, processes: [{{pid: {os.getpid()}, memory: 8 GiB}}]}}]
  2: [{{at: 0, processes: [{{pid: 4194305, memory: 8 GiB}}]}}]
"""


def test_gpu_allocation_comes_from_slurm_the_kubelet_and_processes(
    run_dir: Path, tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "scenario.yml").write_text(ALLOCATED)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0").write_text("4711 alice train\n")
    kubelet = Kubelet(tmp_path)
    kubelet.add("ml", "notebook-0", jupyter=[simulated_uuid(1)])
    flags = (
        f"--run-dir={run_dir}",
        f"--simulate={tmp_path / 'scenario.yml'}",
        f"--collector.allocation.slurm-dir={tmp_path / 'jobs'}",
        f"--collector.allocation.kubelet-socket={kubelet.socket}",
        "--metrics.dcgm",
    )
    with exporter(free_port, *flags) as url:
        eventually(lambda: states(url) == ["working", "unknown", "memory_held_by_dead", "unknown"])
        kubelet.start()  # not before: until it answers, an unused GPU may be allocated to a pod
        eventually(lambda: states(url) == ["working", "allocated_no_process", "memory_held_by_dead", "free"])
        body = metrics(url)
        kubelet.stop()
    holders = [line for line in body if line.startswith("rankscope_gpu_allocation_info")]
    assert len(holders) == 2
    assert 'slurm_job_id="4711"' in holders[0]
    assert 'user="alice"' in holders[0]
    assert 'k8s_pod="notebook-0"' in holders[1]
    as_dcgm = [line for line in body if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert 'hpc_job="4711"' in as_dcgm[0]
    assert all(label in as_dcgm[1] for label in ('container="jupyter"', 'namespace="ml"', 'pod="notebook-0"'))


def states(url: str) -> list[str]:
    """Return the state of each GPU, in order."""
    found = (re.search(r'^rankscope_gpu_state_info\{.*state="(\w+)"', line) for line in metrics(url))
    return [match[1] for match in found if match]


def test_the_log_names_each_address(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(uvicorn, "Server", lambda _: SimpleNamespace(run=lambda **_: None))
    monkeypatch.setattr(daemon.signal, "signal", lambda *_: None)
    caplog.set_level("INFO")
    with ExitStack() as opened:
        first, second = (
            opened.enter_context(socket.create_server((host, 0), family=family))
            for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))
        )
        daemon._serve(uvicorn.Config("", log_config=None), [first, first, second], "https")
        ports = [one.getsockname()[1] for one in (first, second)]
    assert caplog.messages[0].endswith(f" listening on https://127.0.0.1:{ports[0]}, https://[::1]:{ports[1]}")


def test_an_unknown_name_is_reported(start_error: Callable[..., str]) -> None:
    assert start_error("--web.listen-address=gpu01.invalid:7").startswith(
        "rankscope-exporter: --web.listen-address: cannot listen on gpu01.invalid:7: "
    )


def test_a_port_in_use_is_reported(start_error: Callable[..., str], free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        line = start_error(f"--web.listen-address=127.0.0.1:{free_port}")
    address = f"127.0.0.1:{free_port}"
    assert line == f"rankscope-exporter: --web.listen-address: cannot listen on {address}: Address already in use"


def test_a_missing_scenario_is_reported(start_error: Callable[..., str]) -> None:
    assert start_error("--simulate=/nowhere/scenario.yml", "--web.listen-address=127.0.0.1:0") == (
        "rankscope-exporter: --simulate: /nowhere/scenario.yml: No such file or directory"
    )


def test_an_invalid_web_configuration_is_reported(start_error: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("basic_auth_users: {alice: secret}")
    line = start_error(f"--web.config.file={tmp_path / 'web.yml'}", "--web.listen-address=127.0.0.1:0")
    assert line.startswith(f"rankscope-exporter: --web.config.file: {tmp_path / 'web.yml'}: basic_auth_users.alice: ")


@pytest.mark.parametrize(
    ("text", "expected"), [("gpus: none", "gpus"), ("gpus: 2\ncolor: red", "color"), ("[", "not YAML")]
)
def test_an_invalid_scenario_is_reported_with_its_key(
    start_error: Callable[..., str], text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yml").write_text(text)
    line = start_error(f"--simulate={tmp_path / 'wrong.yml'}", "--web.listen-address=127.0.0.1:0")
    assert line.startswith("rankscope-exporter: --simulate: ")
    assert expected in line


@pytest.mark.parametrize("flag", ["--collector.findings.thresholds", "--simulate", "--web.config.file"])
def test_a_file_nested_too_deeply_is_reported(start_error: Callable[..., str], flag: str, tmp_path: Path) -> None:
    path = tmp_path / "nested"
    path.write_text("[" * 100_000)
    line = start_error(f"{flag}={path}", "--web.listen-address=127.0.0.1:0")
    assert re.fullmatch(rf"rankscope-exporter: (argument )?{flag}: {path}: nested too deeply( \(see .*\))?", line)


def test_a_procfs_that_is_not_a_directory_is_reported(start_error: Callable[..., str]) -> None:
    assert start_error("--path.procfs=/nowhere/proc", "--web.listen-address=127.0.0.1:0") == (
        "rankscope-exporter: --path.procfs: /nowhere/proc is not a directory"
    )


def test_an_unknown_flag_is_reported_on_standard_error_with_status_2() -> None:
    process = subprocess.run([*EXPORTER, "--color=red"], capture_output=True, text=True, check=False, timeout=60)
    (line,) = process.stderr.splitlines()
    assert "--color" in line
    assert (process.returncode, process.stdout) == (2, "")


@pytest.mark.parametrize(
    ("unknown", "similar"), [("--port", "--web.listen-address=HOST:PORT"), ("--run-directory", "--run-dir")]
)
def test_an_unknown_flag_is_reported_with_a_similar_one(
    start_error: Callable[..., str], unknown: str, similar: str
) -> None:
    line = f"unrecognized arguments: {unknown}=9000 (did you mean {similar}? see rankscope-exporter --help)"
    assert start_error(f"{unknown}=9000") == f"rankscope-exporter: {line}"


def test_the_log_names_the_run_directories_the_ranks_and_the_number_of_gpus(
    run_dir: Path, tmp_path: Path, free_port: int
) -> None:
    log = tmp_path / "log"
    writers = [write_steps(run_dir, rank) for rank in range(2)]
    flags = ("--run-dir=/nowhere", f"--run-dir={run_dir}", "--simulate=3")
    with log.open("w") as stderr, exporter_process(free_port, *flags, ready="/-/ready", stderr=stderr):
        pass
    text = log.read_text()
    assert 'level=info logger=rankscope_exporter msg="reading rank records from /nowhere' in text
    assert f"/nowhere (does not exist yet), {run_dir}" in text
    assert 'msg="found ranks: 0-1 of run r"' in text
    assert "driver ready: 3 GPUs" in text
    assert writers


def test_the_log_names_a_limited_number_of_runs() -> None:
    def rank(run: str, alive: bool) -> Rank:
        info = {"run": run, "rank": "0"}
        return Rank(RankSnapshot(Path(), alive, (), info, last_words_at=None, read_monotonic=0.0), None, owner=0)

    ranks = [rank(f"r{number}", number > 0) for number in range(daemon.MAX_RUNS_LOGGED + 2)]
    assert daemon._list_ranks([]) == ""
    assert daemon._list_ranks(ranks).startswith("0 of run r1, 0 of run r2, ")
    assert daemon._list_ranks(ranks).endswith(f"0 of run r{daemon.MAX_RUNS_LOGGED}, more runs: 1, ended ranks: 1")


def test_an_address_without_a_host_accepts_ipv4(run_dir: Path, free_port: int) -> None:
    with exporter(free_port, f"--web.listen-address=:{free_port}", f"--run-dir={run_dir}"):
        pass


def test_findings_are_saved_when_the_exporter_stops(run_dir: Path, free_port: int, tmp_path: Path) -> None:
    publish(run_dir)
    saved = tmp_path / f"state-{os.geteuid()}.jsonl"
    flags = (f"--run-dir={run_dir}", "--simulate=1", f"--state-dir={tmp_path}")
    with exporter_process(free_port, *flags) as process:
        eventually(saved.exists)
        saved.unlink()
    assert process.returncode == 0
    assert saved.exists()


def test_with_a_directory_for_captures_their_metrics_are_served(run_dir: Path, free_port: int, tmp_path: Path) -> None:
    captures = tmp_path / "captures"
    with exporter(free_port, f"--run-dir={run_dir}", f"--capture-dir={captures}") as url:
        eventually(lambda: 'rankscope_exporter_captures_total{reason="hang"} 0.0' in metrics(url))
    assert captures.stat().st_mode & 0o777 == 0o711


def test_a_directory_for_captures_that_others_can_change_is_an_error(
    start_error: Callable[..., str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o1777)
    line = start_error(f"--capture-dir={tmp_path}")
    assert line.startswith(f"rankscope-exporter: argument --capture-dir: {tmp_path} is writable by other users")
