"""A job may do anything with descriptors: its rank stays alive, and the hook writes nothing into its files."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from testing.records import record_in
from testing.waiting import eventually
from tests.trainer_hooks.scripts import WAIT, job

from rankscope.record.reader import read_rank

OURS = """
def ours():
    for number in map(int, os.listdir("/proc/self/fd")):
        target = os.readlink(f"/proc/self/fd/{number}") if os.path.exists(f"/proc/self/fd/{number}") else ""
        if ".rank" in target or "rankscope-stacks" in target:
            yield number

directory = os.environ["RANKSCOPE_RUN_DIR"]
held = []

def hold():
    held.extend(open(f"{directory}/precious{len(held)}", "wb", buffering=0) for _ in range(12))

hold()
"""
CLOSINGS = {
    "closes the lowest": "os.closerange(3, 256)",
    "closes all": "os.closerange(3, 20_000)",
    "closes ours one by one": "for number in list(ours()): os.close(number)\nstep()",
    "closes ours past Python": "import ctypes\nfor number in list(ours()): ctypes.CDLL(None).close(number)\nstep()",
    "replaces ours by a file": "for number in list(ours()): os.dup2(held[0].fileno(), number)",
    "replaces ours by a file past Python": (
        "import ctypes\nfor number in list(ours()): ctypes.CDLL(None).dup2(held[0].fileno(), number)\nstep()"
    ),
    "opens and closes its own record": "for name in os.listdir(directory): open(f'{directory}/{name}').close()\nstep()",
}


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_job_that_closes_descriptors_stays_alive_and_keeps_its_files(run_dir: Path, closing: str) -> None:
    setup = f"{OURS}{CLOSINGS[closing]}\nhold()\n"
    with job(WAIT, setup=setup, RANKSCOPE_QUIET="1") as process:
        assert record_in(run_dir).alive
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    assert record_in(run_dir).exit_reason == "sigterm"
    assert {path.read_bytes() for path in run_dir.glob("precious*")} == {b""}


DAEMON = """
import time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)  # then it is rank 0, which prints lines on standard error
os.setsid()
os.closerange(0, 20_000)
held.clear()
hold()  # three of these are now the standard streams
step()
open(f"{directory}/trained", "w").close()
time.sleep(600)
"""


def test_a_job_that_becomes_a_daemon_is_alive_and_its_files_are_not_written(run_dir: Path) -> None:
    with job(OURS + DAEMON) as process:
        assert process.wait() == 0
        eventually(lambda: (run_dir / "trained").exists())
        records = [read_rank(path) for path in run_dir.glob("*.rank")]
        (daemon,) = [record for record in records if record.alive]
        assert daemon["steps"] == 1
        os.kill(daemon.lock_pid, signal.SIGTERM)
        eventually(lambda: not read_rank(daemon.path).alive)
    assert read_rank(daemon.path).exit_reason == "sigterm"
    assert {path.read_bytes() for path in run_dir.glob("precious*")} == {b""}


def test_uninstrument_closes_no_file_of_the_job(run_dir: Path) -> None:
    code = """
import ctypes, rankscope
numbers = list(ours())
for number in numbers:
    ctypes.CDLL(None).dup2(held[0].fileno(), number)
rankscope.uninstrument()
print(all(os.fstat(number) == os.fstat(held[0].fileno()) for number in numbers) and len(numbers), flush=True)
"""
    with job(code, setup=OURS, RANKSCOPE_QUIET="1") as process:
        assert process.read_line() == "2"


def test_the_closing_line_is_not_written_into_a_file_with_the_number_of_standard_error(run_dir: Path) -> None:
    with job("os.close(2)\nhold()\nassert held[12].fileno() == 2\n", setup=OURS) as process:
        assert process.wait() == 0
    assert {path.read_bytes() for path in run_dir.glob("precious*")} == {b""}
