"""The node in a capture: memory, limits, blocked threads, disks and ports; what does not answer delays nothing."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing.sysfs import interface, port

from rankscope_exporter.capture import child, disk
from rankscope_exporter.capture.disk import describe_disks
from rankscope_exporter.capture.machine import BLOCKED_SHOWN, describe_machine
from rankscope_exporter.capture.ports import describe_ports
from rankscope_exporter.capture.source import UnavailableError


def write(root: Path, **files: str) -> Path:
    """Write files below a directory; `__` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def stat(number: int, name: str, state: str) -> str:
    return f"{number} ({name}) {state} 1 1 1 0 -1 0\n"


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    """Return a procfs with rank 7 and its child 8, whose threads are blocked."""
    limits = "Limit           Soft Limit  Hard Limit  Units\nMax open files  1024        4096        files\n"
    root = write(
        tmp_path / "proc",
        meminfo="MemTotal:       2097152 kB\nMemAvailable:   1048576 kB\nHugePages_Free:        3\nSecret: 1 kB\n",
        pressure__io="some avg10=12.50 avg60=1.00 avg300=0.10 total=1234\n",
        loadavg="96.10 80.00 70.00 5/1234 99\n",
        **{
            "sys__fs__file-nr": "9000\t0\t100000\n",
            "7__limits": limits,
            "7__cgroup": "0::/job/step\n",
            "7__task__7__stat": stat(7, "python", "S"),
            "7__task__7__children": "8 ",
            "7__task__9__stat": stat(9, "pt_data ) R", "D"),
            "7__task__9__wchan": "nfs_wait_bit_killable",
            "8__task__8__stat": stat(8, "worker", "D"),
            "8__task__8__wchan": "0",
            "7__environ": "API_KEY=secret",
        },
    )
    for number in range(5):
        write(root, **{f"7__fd__{number}": ""})
    return root


def test_memory_limits_and_blocked_threads_are_named(procfs, tmp_path) -> None:
    group = write(
        tmp_path / "cgroup", **{"job__step__memory.max": "4294967296\n", "job__step__memory.events": "oom 2\n"}
    )
    text = describe_machine([7], procfs=procfs, cgroups=group)
    for line in (
        "  MemAvailable: 1.00 GiB",
        "  HugePages_Free: 3",
        "  io: some avg10=12.50 avg60=1.00 avg300=0.10",
        f"  96.10 80.00 70.00 (1, 5 and 15 min), {os.cpu_count()} CPUs, running and all tasks 5/1234",
        "  open files of all processes: 9000 of 100000",
        "  process 7: memory.max 4294967296, memory.events oom 2",
        "  process 7: 5 of 1024",
        "  process 7, thread 9 (pt_data ) R): nfs_wait_bit_killable",
        "  process 8, a child of 7, thread 8 (worker)",
    ):
        assert line in text.splitlines(), text
    assert "secret" not in text.lower()


def test_the_number_of_blocked_threads_is_limited(tmp_path) -> None:
    for number in range(BLOCKED_SHOWN + 10):
        write(tmp_path, **{f"7__task__{number}__stat": stat(number, "x", "D")})
    assert "  and 10 more" in describe_machine([7], procfs=tmp_path, cgroups=tmp_path).splitlines()


def test_of_a_process_that_has_ended_nothing_is_shown(tmp_path) -> None:
    text = describe_machine([7], procfs=tmp_path, cgroups=tmp_path)
    assert "process 7" not in text
    assert "Memory\n  unknown\n" in text


def test_this_machine_is_described() -> None:
    text = describe_machine([os.getpid()])
    assert re.search(r"MemTotal: [\d.]+ GiB", text)
    assert re.search(rf"process {os.getpid()}: \d+ of ", text)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tmp_path) as process:
        yield process.pid
        assert process.stdin
        process.stdin.close()


def test_each_disk_of_a_run_is_named_once_with_its_file_system_and_space(rank, tmp_path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tmp_path) as other:
        shm, tmp, own = describe_disks([rank, other.pid]).splitlines()
        assert other.stdin
        other.stdin.close()
    assert re.fullmatch(r"/dev/shm \(tmpfs \S+\): [\d.]+ of [\d.]+ GiB free, \d+ of \d+ files", shm)
    assert tmp.startswith("/tmp")
    assert re.fullmatch(rf"{tmp_path} \(\S+ \S+\): [\d.]+ of [\d.]+ GiB free, .*", own)


def test_of_processes_that_may_not_be_seen_the_exporters_directories_are_shown(tmp_path) -> None:
    assert [line.partition(" ")[0] for line in describe_disks([7], tmp_path).splitlines()] == ["/dev/shm", "/tmp"]


def test_a_file_system_that_does_not_answer_is_named_and_delays_no_other(rank, tmp_path, monkeypatch) -> None:
    original = child.run_child

    def run(module: str, path: str, **options: float) -> str:
        if path.endswith(str(tmp_path)):
            raise UnavailableError("no result within 5 s: a file system may not answer")
        return original(module, path, **options)

    monkeypatch.setattr(disk, "run_child", run)
    shm, _, own = describe_disks([rank]).splitlines()
    assert "GiB free" in shm
    assert own.endswith("no result within 5 s: a file system may not answer")


def test_the_kind_of_a_file_system_is_that_of_the_deepest_mount(tmp_path) -> None:
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:40 / /data rw shared:1 - nfs4 storage:/export rw\n"
        "24 22 0:41 / /database rw - xfs /dev/sdb rw\nbroken\n"
    )
    process = write(tmp_path, mountinfo=mounts)
    assert disk._file_system(process, "/data/run") == "nfs4 storage:/export"
    assert disk._file_system(process, "/home") == "ext4 /dev/sda1"


def test_ports_show_their_traffic_and_their_errors(tmp_path) -> None:
    port(tmp_path, "mlx5_0", data=1_000, errors={"symbol_error": 4})
    interface(tmp_path, "eth0", rx_packets=5, tx_packets=5)
    adapter, ethernet = describe_ports(tmp_path, pause=0.0).splitlines()
    assert adapter.startswith("mlx5_0: ")
    for part in (
        "up",
        "400 Gb/s",
        "received 0 bytes in ",
        "link down 0 times",
        "errors since the driver was loaded: symbol_error 4",
    ):
        assert part in adapter
    assert ethernet.startswith("eth0: received 0 packets in ")


def test_without_ports_there_is_nothing_to_say(tmp_path) -> None:
    with pytest.raises(UnavailableError, match="no network port"):
        describe_ports(tmp_path, pause=0.0)
