"""The state of a process as the kernel shows it."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from testing.programs import python, running

from rankscope_exporter.capture.process_state import (
    ProcessState,
    ThreadState,
    open_process,
    read_process,
)
from rankscope_exporter.capture.thread_waits import other_wait, storage_file, storage_wait, threads_for_gil


def state(pid: int, owner: int) -> ProcessState:
    directory = open_process(pid)
    try:
        return read_process(directory, pid, owner)
    finally:
        os.close(directory)


def main_thread(code: str, call: str) -> ThreadState:
    """Return the main thread of a process that runs this code, once it is in the system call."""
    with running(*python(code)) as process:
        while not (main := state(process.pid, os.geteuid()).main) or not main.call.startswith(call):
            pass
    return main


def test_a_process_that_reads_from_a_pipe_is_shown_with_its_file(tmp_path: Path) -> None:
    pipe = tmp_path / "shard.bin"
    os.mkfifo(pipe)
    main = main_thread(
        f"import os; d = os.open({str(pipe)!r}, os.O_RDWR); print('ready', flush=True); os.read(d, 1)", "read"
    )
    assert main.call == f"read of {pipe}"
    assert storage_file(main.call) == str(pipe)


def test_a_process_that_opens_a_pipe_or_waits_for_a_lock_waits_for_storage(tmp_path: Path) -> None:
    pipe, lock = tmp_path / "shard.bin", tmp_path / "cache.lock"
    os.mkfifo(pipe)
    assert storage_wait(main_thread(f"print('ready', flush=True); open({str(pipe)!r})", "openat")) == "to open a file"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code = f"import fcntl; f = open({str(lock)!r}); print('ready', flush=True); fcntl.flock(f, fcntl.LOCK_EX)"
        assert storage_wait(main_thread(code, "flock")) == f"for a lock on {lock}"


def test_a_process_whose_output_is_not_read_is_shown_as_such() -> None:
    main = main_thread("import os; print('ready', flush=True); os.write(1, bytes(2**24))", "write")
    assert (storage_wait(main), other_wait(main)) == ("", "to write its output")


@pytest.mark.parametrize("call", ["read of /dev/null", "read of pipe:[12]", "read of socket:[12]", "futex", "", "read"])
def test_a_descriptor_that_is_no_file_is_no_storage(call: str) -> None:
    assert storage_file(call) == ""


def test_only_children_of_the_same_user_are_shown() -> None:
    code = """
import os, sys, time
for user in os.geteuid(), 61001:
    if os.fork() == 0:
        if os.geteuid() == 0:
            os.setresuid(user, user, user)
        os.write(1, b"ready\\n" * (user == 61001))
        time.sleep(10)
        os._exit(0)
time.sleep(10)
"""
    with running(*python(code)) as parent:
        workers = state(parent.pid, os.geteuid()).workers
    assert len(workers) == (1 if os.geteuid() == 0 else 2)


MAPS = """\
1000-2000 rw-p 00003000 fe:00 26723      /usr/bin/python3.11
2000-3000 rw-p 00000000 00:00 0
4000-5000 rw-p 00000000 00:00 0          [heap]
5000-6000 rw-p 00000000 00:00 0
70"""


def thread(number: int, switches: int, call: str = "futex", address: int = 0x2008) -> ThreadState:
    return ThreadState(number, "python", "S (sleeping)", call, "", "", switches, address=address)


def process(*threads: ThreadState) -> ProcessState:
    return ProcessState(1, 1, "", "", threads, maps=MAPS)


@pytest.mark.parametrize(
    ("address", "is_gil"), [(0x1008, True), (0x2008, True), (0x4008, False), (0x5008, False), (0, False)]
)
def test_only_a_variable_of_the_interpreter_is_the_gil(address: int, is_gil: bool) -> None:
    before, after = (process(thread(2, switches, address=address)) for switches in (0, 100))
    assert threads_for_gil(before, after, 0.5) == ({2} if is_gil else set())


def test_a_thread_that_waits_for_an_event_as_briefly_does_not_wait_for_the_gil() -> None:
    code = """
import threading, time
def poll():
    while True:
        threading.Event().wait(0.005)
threading.Thread(target=poll, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""
    with running(*python(code)) as polling:
        before = state(polling.pid, os.geteuid())
        after, began = before, time.monotonic()
        while sum(one.switches for one in after.threads[1:]) - sum(one.switches for one in before.threads[1:]) < 50:
            after = state(polling.pid, os.geteuid())
    assert threads_for_gil(before, after, time.monotonic() - began) == frozenset()


def test_a_thread_that_wakes_up_each_five_milliseconds_in_a_futex_waits_for_the_gil() -> None:
    before = process(thread(1, 0, "poll"), thread(2, 100), thread(3, 0, "epoll_wait"), thread(4, 7), thread(5, 0))
    after = process(
        thread(1, 0, "poll"), thread(2, 200), thread(3, 100, "epoll_wait"), thread(4, 8), thread(5, 900), thread(6, 100)
    )
    assert threads_for_gil(before, after, 0.5) == {2}


def test_time_in_a_run_queue_does_not_hide_a_waiter_for_the_gil() -> None:
    before, after = process(thread(2, 0)), process(replace(thread(2, 20), run_queue=0.4))
    assert threads_for_gil(before, after, 0.5) == {2}
    assert threads_for_gil(before, process(thread(2, 20)), 0.5) == frozenset()


def test_waiters_for_the_gil_are_seen_in_a_real_process() -> None:
    code = """
import ctypes, threading, time
threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(10**6)], daemon=True).start()
print("ready", flush=True)
ctypes.PyDLL(None).usleep(20_000_000)
"""
    with running(*python(code)) as held:
        waiters: frozenset[int] = frozenset()
        while not waiters:
            before, began = state(held.pid, os.geteuid()), threading.Event()
            began.wait(0.5)
            waiters = threads_for_gil(before, state(held.pid, os.geteuid()), 0.5)
    assert held.pid not in waiters


def test_the_text_has_no_environment() -> None:
    secret = "SECRET_OF_THE_JOB"
    with running(
        *python("import time; print('ready', flush=True); time.sleep(60)"), env={**os.environ, secret: "1"}
    ) as one:
        found = replace(state(one.pid, os.geteuid()))
    assert secret not in "\n".join(found.lines())
    assert "command: " in "\n".join(found.lines())
