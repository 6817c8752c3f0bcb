"""The kernel's messages in a capture: those that concern the run, and no other user's processes."""

from __future__ import annotations

import calendar
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rankscope_exporter import kernel_messages
from rankscope_exporter.capture.kernel_log import BYTES, read_kernel_log
from rankscope_exporter.capture.source import UnavailableError

OWN, OTHER, OWNER = 4711, 815, 1000
Log = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Return a function that writes a log as /dev/kmsg, with a message each second until now."""

    def write(*texts: str, priority: int = 4) -> Path:
        now = time.monotonic()
        times = (round((now - len(texts) + number) * 1e6) for number in range(1, len(texts) + 1))
        path = tmp_path / "kmsg"
        lines = (
            f"{priority},{number},{at},-,caller=T1;{text}\n SUBSYSTEM=pci\n"
            for number, (at, text) in enumerate(zip(times, texts, strict=True))
        )
        path.write_text("".join(lines))
        return path

    return write


def read(path: Path, since: float = 0.0) -> str:
    return read_kernel_log(since, [OWN], OWNER, path=path)


SHOWN = {
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.": "GPU",
    "mlx5_core 0000:17:00.0 mlx5_0: Link down": "network adapter",
    "bnxt_en 0000:17:00.0 eth0: NIC Link is Down": "network adapter",
    "ib0: link is down": "network adapter",
    "Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:2kB, UID:1000 pgtables:3kB": "memory",
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=4711,uid=1000": "memory",
    "[   4711]  1000  4711   123456    65432   1024        0             0 python": "memory",
    "mce: [Hardware Error]: Machine check events logged": "memory",
    "I/O error, dev nvme0n1, sector 12345 op 0x0:(READ)": "storage",
    "nfs: server storage not responding, still trying": "storage",
    "INFO: task python:4711 blocked for more than 122 seconds.": "hung task",
    "pcieport 0000:16:01.0: AER: Uncorrectable (Fatal) error received": "CPU or bus",
    "python[4711]: segfault at 0 ip 00007f rsp 00007f error 4 in libcuda.so": "crashed process",
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_message_that_concerns_the_run_is_shown_with_its_time(log, text) -> None:
    first, *_, line = read(log("usb 1-1: new device", text)).splitlines()
    assert first == f"Messages of the kernel since the run's start: {SHOWN[text]} 1."
    when, _, rest = line.partition(" UTC  ")
    assert rest == text
    assert abs(calendar.timegm(time.strptime(when, "%Y-%m-%d %H:%M:%S")) - time.time()) < 100.0


OTHERS = {
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=815, name=secret, MMU Fault": "NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault",
    "NVRM: Xid (PCI:0000:3b:00): 31, pid='<unknown>', name=<unknown>, Ch 1": "NVRM: Xid (PCI:0000:3b:00): 31, Ch 1",
    "Memory cgroup out of memory: Killed process 815 (secret) total-vm:1kB, UID:1001 pgtables:3kB": (
        "the out of memory killer: a process of another user or job was killed"
    ),
    "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/secret,task=secret,pid=815,uid=1001": (
        "the out of memory killer: a process of another user or job is chosen"
    ),
    "secret invoked oom-killer: gfp_mask=0x1, order=0": "a process invoked oom-killer: gfp_mask=0x1, order=0",
    "INFO: task secret:815 blocked for more than 122 seconds.": (
        "a task of another user or job blocked for more than 122 seconds."
    ),
    "[    815]  1001   815   123456    65432   1024        0             0 secret": "",
    "secret[815]: segfault at 0 ip 00007f rsp 00007f error 4 in libcuda.so": "",
    "NVRM: secret[815]: segfault at 0 ip 00007f rsp 00007f error 4": "",
    "traps: secret[815] general protection fault ip:7f sp:7f error:0": "",
    "usb 1-1: secret device": "",
}


@pytest.mark.parametrize("text", OTHERS)
def test_a_process_of_another_user_is_not_named(log, text) -> None:
    found = read(log(text))
    assert "secret" not in found
    assert str(OTHER) not in found
    assert found.partition(" UTC  ")[2] == OTHERS[text]


def test_a_thread_of_the_run_is_the_runs_and_its_kernel_stack_follows(log) -> None:
    started, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), ended.wait()))
    thread.start()
    started.wait()
    try:
        path = log(f"INFO: task python:{thread.native_id} blocked for more than 122 seconds.")
        at = path.read_text().split(",")[2]
        with path.open("a") as file:
            file.write(f"4,8,{at},-;Call Trace:\n4,9,{at},-; nfs_wait_bit_killable+0x11/0x60\n")
        found = read_kernel_log(0.0, [os.getpid()], OWNER, path=path)
    finally:
        ended.set()
        thread.join()
    assert [line.partition(" UTC  ")[2] for line in found.splitlines()[-2:]] == [
        "Call Trace:",
        " nfs_wait_bit_killable+0x11/0x60",
    ]


def test_messages_before_the_run_and_of_user_processes_are_left_out(log) -> None:
    path = log("NVRM: old", "NVRM: new")
    assert "old" not in read(path, since=time.time() - 0.5)
    kernels = path.read_text()
    path.write_text(log("NVRM: forged", priority=12).read_text() + kernels)
    assert "forged" not in read(path)


def test_lost_messages_are_mentioned(log) -> None:
    assert "has no message from before" in read(log("NVRM: x"))
    assert "has no message from before" not in read(log("NVRM: x", "NVRM: y"), since=time.time() - 0.5)


def test_the_newest_messages_of_a_long_log_are_shown(log) -> None:
    found = read(log(*(f"NVRM: message {number} {'x' * 1000}" for number in range(3000))))
    assert "message 2999 " in found
    assert "message 0 " not in found
    assert len(found.encode()) <= BYTES
    assert "GPU 3000" in found


def test_a_log_that_may_not_be_read_is_the_reason(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kernel_messages, "_syslog", lambda: None)
    with pytest.raises(UnavailableError, match="CAP_SYSLOG"):
        read(tmp_path / "missing")


def test_without_the_device_the_system_call_is_used(tmp_path, monkeypatch) -> None:
    at = time.monotonic()
    text = f"<6>[{at:12.6f}] usb 1-1: x\n<4>[{at:12.6f}][    T1] NVRM: Xid 1\n<12>[{at:12.6f}] NVRM: forged\n"
    monkeypatch.setattr(kernel_messages, "_syslog", lambda: text)
    found = read(tmp_path / "missing")
    assert found.endswith("UTC  NVRM: Xid 1")
    assert "forged" not in found


def test_this_machines_log_is_read_or_refused_without_blocking() -> None:
    with suppress(UnavailableError):
        assert read_kernel_log(0.0, [], OWNER).startswith("Messages of the kernel since the run's start: ")
