"""Ends that are hard to tell: the record says what is true, and nothing that cannot be known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot

TRAIN = """
import os, sys
import torch
torch.set_num_threads(1)
weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)

def step():
    weights.sum().backward()
    optimizer.step()

step()
"""
SAY_TRAINED = "print('trained', flush=True)\n"
CAUGHT = """
def fail(_):
    raise ZeroDivisionError

handle = weights.register_hook(fail)
try:
    step()
except ZeroDivisionError:
    handle.remove()
step()
"""
LOADER = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            FAIL
        return torch.ones(1)

for batch in DataLoader(Numbers(), num_workers=1):
    step()
"""
OUT_OF_MEMORY = {"raised": "raise MemoryError", "killed": "os.kill(os.getpid(), 9)"}


@contextmanager
def job(run_dir: Path, code: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", "RANKSCOPE_RUN_DIR": str(run_dir)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *options, "-c", TRAIN + code]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def record_in(run_dir: Path) -> RankSnapshot:
    (path,) = run_dir.glob("*.rank")
    return read_rank(path)


def end_of(run_dir: Path, code: str, *options: str, typed: str = "") -> tuple[str | None, int]:
    """How the record says that the script ended, and the exit status that its parent sees."""
    with job(run_dir, code, *options) as process:
        process.communicate(typed)
    return record_in(run_dir).exit_reason, process.returncode


# Nothing in the process can know the status of a main thread that left by SystemExit: Python has cleared the exception
# when atexit runs, and sys.excepthook is not called for it. So the record says that Python was left in order.
@pytest.mark.parametrize(("code", "status"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('no data')", 1)])
def test_sys_exit_is_finished_whatever_its_status(run_dir: Path, code: str, status: int) -> None:
    assert end_of(run_dir, code) == ("finished", status)


def test_an_exit_past_python_is_killed_as_it_leaves_no_word(run_dir: Path) -> None:
    assert end_of(run_dir, "os._exit(3)") == ("killed", 3)


def test_an_exception_in_backward_that_is_caught_is_no_end(run_dir: Path) -> None:
    assert end_of(run_dir, CAUGHT) == ("finished", 0)
    assert record_in(run_dir)["steps"] == 2


@pytest.mark.parametrize("how", OUT_OF_MEMORY)
def test_a_loader_worker_that_runs_out_of_memory_ends_its_rank_by_an_exception(run_dir: Path, how: str) -> None:
    assert end_of(run_dir, LOADER.replace("FAIL", OUT_OF_MEMORY[how])) == ("exception", 1)
    assert record_in(run_dir).phase in ("other", "startup", "data_wait")


# Of a killed worker torch tells the main thread twice, wherever that is by then: no script survives it for sure.
def test_a_loader_worker_whose_lack_of_memory_is_caught_ends_nothing(run_dir: Path) -> None:
    caught = LOADER.replace("FAIL", OUT_OF_MEMORY["raised"]).replace("for batch", "try:\n  for batch")
    caught = caught.replace("\n    step", "\n      step") + "except MemoryError:\n    step()\n"
    assert end_of(run_dir, caught) == ("finished", 0)


def test_a_stopped_rank_is_alive_and_makes_no_progress_until_it_goes_on(run_dir: Path) -> None:
    with job(run_dir, SAY_TRAINED + "while sys.stdin.readline():\n    step(); print('step', flush=True)\n") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        while "T (stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        before = record_in(run_dir)
        process.stdin.write("go\n")
        process.stdin.flush()
        after = record_in(run_dir)
        assert after.alive
        assert after.last_progress == before.last_progress
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "step\n"
        assert record_in(run_dir)["steps"] == 2
    assert record_in(run_dir).exit_reason == "killed"


def test_a_stopped_rank_that_is_killed_is_killed(run_dir: Path) -> None:
    with job(run_dir, SAY_TRAINED + "sys.stdin.read()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        process.kill()
        process.wait()
    assert record_in(run_dir).exit_reason == "killed"


def test_an_exception_that_a_shell_survives_is_no_end(run_dir: Path) -> None:
    typed = "raise KeyError('typed')\nstep()\n"
    assert end_of(run_dir, "raise KeyError('script')", "-i", typed=typed) == ("finished", 0)
    assert record_in(run_dir)["steps"] == 2


NOTEBOOK = """
import code
sys.ps1 = "In : "  # as IPython sets it
console = code.InteractiveConsole(globals())
for cell in ("step()", "raise KeyboardInterrupt", "1 / 0", "step()"):
    try:
        console.push(cell)
    except KeyboardInterrupt:
        pass
"""


def test_what_a_notebook_survives_is_no_end(run_dir: Path) -> None:
    assert end_of(run_dir, NOTEBOOK) == ("finished", 0)
    assert record_in(run_dir)["steps"] == 3


def test_uninstrument_on_another_thread_takes_the_sigterm_watch_back(run_dir: Path) -> None:
    code = """
import rankscope, threading
thread = threading.Thread(target=rankscope.uninstrument)
thread.start()
thread.join()
"""
    # One of these gets the number of the descriptor that the watch wrote to.
    files = "held = [open(os.environ['RANKSCOPE_RUN_DIR'] + f'/precious{n}', 'w') for n in range(9)]\n"
    with job(run_dir, code + files + SAY_TRAINED + "sys.stdin.read()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert [path.read_text() for path in run_dir.glob("precious*")] == [""] * 9
