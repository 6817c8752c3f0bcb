"""The end of a rank in its record."""

from __future__ import annotations

import os
import pickle
import posix
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from testing.programs import python, running
from testing.records import record_in
from testing.waiting import eventually
from tests.trainer_hooks.scripts import READY, TRAIN, WAIT, WITHOUT_TORCH, job, watched

from rankscope.process.ending import Ending
from rankscope.record.writer import RankWriter

SPAWNED = """
import multiprocessing, sys

def train(argument):
    import torch
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    if argument == "bad":
        raise RuntimeError(argument)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(sys.argv[2],))
    process.start()
    process.join()
"""
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
NOTEBOOK = """
import code
sys.ps1 = "In : "  # as in IPython
console = code.InteractiveConsole(globals())
for cell in ("step()", "raise KeyboardInterrupt", "1 / 0", "step()"):
    try:
        console.push(cell)
    except KeyboardInterrupt:
        pass
"""


def end_of(run_dir: Path, code: str, *options: str, typed: str = "", rank: str = TRAIN) -> tuple[str | None, int, str]:
    """Run a script; return its end in the record, its exit status and its standard error."""
    with job(code, *options, rank=rank) as process:
        _, errors = process.communicate(typed)
    return record_in(run_dir).exit_reason, process.returncode, errors


CAUGHT_EXIT = """
try:
    sys.exit(3)
except SystemExit:
    pass
"""
WRAPPED = """
def wrapper():
    try:
        raise ValueError("lost")
    except ValueError:
        sys.exit(1)

wrapper()
"""
CLEANED_UP = """
def clean_up():
    try:
        sys.exit(1)
    finally:
        print("cleared")
"""
CTRL_C = """
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    sys.exit(1)
"""
RAISED_AGAIN = """
def framework():
    try:
        sys.exit(1)
    except BaseException as error:
        print(error)
        raise

framework()
"""
MISSING_PROGRAM = """
try:
    os.execv("/missing", ["missing"])
except OSError:
    os.kill(os.getpid(), signal.SIGKILL)
"""
FORKED_EXIT = """
if os.fork() == 0:
    os._exit(3)
os.wait()
"""
# The status of `raise SystemExit(3)` in the main thread is not known: Python has cleared the error when atexit runs,
# and does not call sys.excepthook for it.
ENDS = {
    "the end of the script": ("", "finished", 0),
    "sys.exit with success": ("sys.exit(0)", "finished", 0),
    "sys.exit with a status": ("sys.exit(3)", "exception", 3),
    "sys.exit with a text": ("sys.exit('no data')", "exception", 1),
    "sys.exit with a status that is 0 to the kernel": ("sys.exit(256)", "finished", 0),
    "sys.exit in an except block, as in Hydra": (WRAPPED, "exception", 1),
    "sys.exit before a finally, as in Hydra": (CLEANED_UP + "clean_up()", "exception", 1),
    "sys.exit that is caught": (CAUGHT_EXIT, "finished", 0),
    "sys.exit that is caught after a finally": (
        CLEANED_UP + "try:\n    clean_up()\nexcept SystemExit:\n    pass",
        "finished",
        0,
    ),
    "sys.exit after Ctrl-C": (CTRL_C, "finished", 1),
    "sys.exit with the status of a signal": ("sys.exit(143)", "finished", 143),
    "sys.exit that a framework raises again": (RAISED_AGAIN, "exception", 1),
    "sys.exit that a framework raises again and the script catches": (
        f"try:\n{textwrap.indent(RAISED_AGAIN, '    ')}\nexcept SystemExit:\n    pass",
        "finished",
        0,
    ),
    "exit with a status": ("exit(3)", "exception", 3),
    "quit with a status": ("quit(code=3)", "exception", 3),
    "exit with success": ("exit()", "finished", 0),
    "SystemExit raised by the script": ("raise SystemExit(3)", "finished", 3),
    "os._exit with success": ("os._exit(0)", "finished", 0),
    "os._exit with a status": ("os._exit(3)", "exception", 3),
    "os._exit with the status of a signal": ("os._exit(143)", "finished", 143),
    "another program in this process": ("os.execvp('true', ['true'])", "finished", 0),
    "another program that is missing": (MISSING_PROGRAM, "killed", -9),
    "os._exit of a forked child": (FORKED_EXIT, "finished", 0),
    "an exception": ("raise KeyError('lost')", "exception", 1),
    "an exception with an excepthook that calls no other": (
        "sys.excepthook = lambda *_: None\nraise KeyError('lost')",
        "exception",
        1,
    ),
}

# One end of each kind, and the end that depends on what the hook does in a forked child.
WITH_TORCH = {"the end of the script", "sys.exit in an except block, as in Hydra", "SystemExit raised by the script"}
WITH_TORCH |= {"sys.exit that is caught", "os._exit with a status", "os._exit of a forked child", "an exception"}


@pytest.mark.parametrize("end", ENDS)
def test_the_record_has_the_end_of_the_script(run_dir: Path, end: str) -> None:
    code, *expected = ENDS[end]
    assert [*end_of(run_dir, code, rank=TRAIN if end in WITH_TORCH else WITHOUT_TORCH)[:2]] == expected


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("lost")

try:
    main()
except ValueError:
    pass
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (RECORDED + "raise SystemExit(1)", "exception"),
        (RECORDED + "time.sleep(0.5)\nstep()", "finished"),
        ("raise SystemExit(1)", "finished"),
    ],
)
def test_an_error_reported_to_torchrun_is_the_end_of_the_rank(
    run_dir: Path, tmp_path: Path, code: str, reason: str
) -> None:
    with job(code, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")) as process:
        process.wait()
    assert record_in(run_dir).exit_reason == reason


def test_the_watched_exits_can_be_pickled_and_are_restored() -> None:
    before = os._exit, posix._exit, sys.exit
    others = os.execve, posix.execve, signal.signal, type(exit).__call__
    ending = Ending(RankWriter())
    ending.watch()
    assert (os._exit, sys.exit) != before[::2]
    assert pickle.loads(pickle.dumps((os._exit, sys.exit))) == (os._exit, sys.exit)
    ending.forget()
    assert (os._exit, posix._exit, sys.exit) == before
    assert (os.execve, posix.execve, signal.signal, type(exit).__call__) == others


@pytest.mark.parametrize(
    ("code", "number", "reason"),
    [
        (WAIT, signal.SIGTERM, "sigterm"),
        ("threading.Event().wait()", signal.SIGTERM, "sigterm"),
        ("time.sleep(600)", signal.SIGTERM, "sigterm"),
        (WAIT, signal.SIGKILL, "killed"),
        (WAIT, signal.SIGINT, "interrupted"),
    ],
)
def test_the_record_has_the_signal_that_ended_the_rank_even_if_it_is_blocked(
    run_dir: Path, code: str, number: signal.Signals, reason: str
) -> None:
    with job(code, rank=TRAIN if code == WAIT else WITHOUT_TORCH) as process:
        assert record_in(run_dir).alive
        process.send_signal(number)
        assert process.wait() == -number
    assert record_in(run_dir).exit_reason == reason


GROUP = """
import torch.distributed as dist

def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

join()
step()
"""
LEAVE = "dist.destroy_process_group()\n"
EVALUATE = "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
LEAVE_AFTER_ERROR = """
try:
    raise KeyError("lost")
except KeyError:
    dist.destroy_process_group()
"""
ABORT = "dist.distributed_c10d._abort_process_group()\n"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (LEAVE + KILL, "finished"),
        (LEAVE + EVALUATE + KILL, "finished"),
        (LEAVE + TERMINATE, "sigterm"),
        (LEAVE + "raise KeyError('lost')", "exception"),
        (LEAVE + "step()\n" + KILL, "killed"),
        (LEAVE + "join()\n" + KILL, "killed"),
        (LEAVE_AFTER_ERROR + KILL, "killed"),
        (ABORT + KILL, "killed"),
        (KILL, "killed"),
    ],
)
def test_a_rank_that_left_its_group_has_finished_unless_it_continues(run_dir: Path, code: str, reason: str) -> None:
    assert end_of(run_dir, GROUP + code)[0] == reason


STOPPED_BY_A_HANDLER = """
def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

signal.signal(signal.SIGTERM, stop)
"""
RESTORED = """
before = signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGTERM, before)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.parametrize("handlers", [STOPPED_BY_A_HANDLER, RESTORED])
def test_sigterm_is_recorded_after_the_job_has_restored_its_default_handler(run_dir: Path, handlers: str) -> None:
    with job(WAIT, rank=WITHOUT_TORCH, setup=handlers) as process:
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert record_in(run_dir).exit_reason == "sigterm"


@pytest.mark.parametrize("after", ["", "rankscope.uninstrument()\n"])
def test_the_jobs_own_handler_still_handles_sigterm(run_dir: Path, after: str) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    with job(WAIT, rank=TRAIN if after else WITHOUT_TORCH, setup=handler + after) as process:
        process.terminate()
        assert process.wait() == 7
    assert record_in(run_dir).exit_reason == "finished"


SURVIVES = """
from rankscope.process import ending as module
from rankscope.timeline import steps
module.SIGTERM_GRACE, steps.POLL_INTERVAL = 0.3, 0.0
timeline.steps.polls.append(ending.poll)

def train(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        timeline.step()
        time.sleep(0.01)

def stop():
    os.kill(os.getpid(), signal.SIGTERM)

"""
IGNORED, HANDLED = "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.signal(signal.SIGTERM, lambda *_: None)"
SURVIVED = {
    "an exception": (HANDLED, "stop(); train(0.5); 1 / 0", "exception"),
    "an exception, the signal ignored": (IGNORED, "stop(); train(0.5); 1 / 0", "exception"),
    "a clean end": (HANDLED, "stop(); train(0.5)", "finished"),
    "SIGKILL": (HANDLED, "stop(); train(0.5); os.kill(os.getpid(), 9)", "killed"),
    "a second SIGTERM": (HANDLED, "stop(); train(0.5); stop(); train(0.1); 1 / 0", "sigterm"),
    "a second SIGTERM before the first is survived": (
        HANDLED,
        "stop(); train(0.2); stop(); train(0.2); 1 / 0",
        "sigterm",
    ),
    "a second SIGTERM that is survived": (HANDLED, "stop(); train(0.1); stop(); train(0.5); 1 / 0", "exception"),
    "a few steps": (HANDLED, "stop(); train(0.1); 1 / 0", "sigterm"),
    "SIGKILL after the grace period of a blocked rank": (
        IGNORED,
        "stop(); time.sleep(0.5); os.kill(os.getpid(), 9)",
        "sigterm",
    ),
    "the last step and a long checkpoint": (HANDLED, "stop(); timeline.step(); time.sleep(0.5); 1 / 0", "sigterm"),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_a_rank_that_trains_long_after_sigterm_was_not_stopped_by_it(run_dir: Path, name: str) -> None:
    handler, code, reason = SURVIVED[name]
    assert end_of(run_dir, code, rank=f"import signal\n{handler}\n{WITHOUT_TORCH}{SURVIVES}")[0] == reason


def test_a_forked_child_does_not_change_the_end_of_its_parents_record(run_dir: Path) -> None:
    forked = """
child = os.fork()
if child == 0:
    time.sleep(600)
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)
helper = os.fork()
if helper == 0:
    time.sleep(600)
print(helper, flush=True)
"""
    with job(forked + WAIT) as process:
        helper = int(process.read_line())
        assert record_in(run_dir).alive
        assert record_in(run_dir).last_words_at is None
        process.end()
        assert record_in(run_dir).exit_reason == "killed"
        os.kill(helper, signal.SIGKILL)


def test_sigterm_in_a_thread_without_python_code_is_noted_while_the_process_forks(run_dir: Path) -> None:
    stopped_in_fork = """
import ctypes, os, time
native = ctypes.CDLL(None)
native.pthread_create(ctypes.byref(ctypes.c_ulong()), None, native.pause, None)
os.register_at_fork(before=lambda: (print("forking", flush=True), time.sleep(600)))
"""
    with job("os.fork()", rank=stopped_in_fork + TRAIN) as process:
        assert process.read_line() == "forking"
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert record_in(run_dir).exit_reason == "sigterm"


def test_a_child_keeps_the_sigterm_handler_that_its_parent_set_after_the_hook(run_dir: Path) -> None:
    forked = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
child = os.fork()
if child == 0:
    print("child", flush=True)
    time.sleep(600)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    with job(forked) as process:
        assert process.read_line() == "child"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.read_line() == "9"


def test_a_faulthandler_that_the_job_registered_first_is_kept(run_dir: Path) -> None:
    first = "import faulthandler, signal\nfaulthandler.register(signal.SIGTERM, chain=False)\n"
    with running(*python(first + WITHOUT_TORCH + READY + WAIT), env=watched(), stderr=subprocess.PIPE) as process:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Current thread" in errors


def test_a_caught_exception_in_backward_is_not_the_end(run_dir: Path) -> None:
    assert end_of(run_dir, CAUGHT)[:2] == ("finished", 0)
    assert record_in(run_dir)["steps"] == 2


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_loader_worker_that_runs_out_of_memory_ends_its_rank_by_an_exception(run_dir: Path, kind: str) -> None:
    assert end_of(run_dir, LOADER.replace("FAIL", OUT_OF_MEMORY[kind]))[:2] == ("exception", 1)
    assert record_in(run_dir).phase in ("other", "startup", "data_wait")


# For a killed worker torch raises in the main thread twice, at any point: a script cannot reliably catch that.
def test_a_caught_memory_error_of_a_loader_worker_is_not_the_end(run_dir: Path) -> None:
    caught = LOADER.replace("FAIL", OUT_OF_MEMORY["raised"]).replace("for batch", "try:\n  for batch")
    caught = caught.replace("\n    step", "\n      step") + "except MemoryError:\n    step()\n"
    assert end_of(run_dir, caught)[:2] == ("finished", 0)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())


def test_a_stopped_rank_is_alive_and_makes_no_progress_until_it_continues(run_dir: Path) -> None:
    with job("while sys.stdin.readline():\n    step(); print('step', flush=True)\n") as process:
        stop(process)
        before = record_in(run_dir)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        after = record_in(run_dir)
        assert after.alive
        assert after.last_progress == before.last_progress
        process.send_signal(signal.SIGCONT)
        assert process.read_line() == "step"
        assert record_in(run_dir)["steps"] == 2
    assert record_in(run_dir).exit_reason == "killed"


def test_a_rank_that_is_killed_while_stopped_is_killed(run_dir: Path) -> None:
    with job(WAIT, rank=WITHOUT_TORCH) as process:
        stop(process)
        process.end()
    assert record_in(run_dir).exit_reason == "killed"


def test_an_exception_in_a_shell_is_not_the_end(run_dir: Path) -> None:
    typed = "raise KeyError('typed')\nstep()\n"
    assert end_of(run_dir, "raise KeyError('script')", "-i", typed=typed)[:2] == ("finished", 0)
    assert record_in(run_dir)["steps"] == 2


def test_an_exception_in_a_notebook_is_not_the_end(run_dir: Path) -> None:
    assert end_of(run_dir, NOTEBOOK)[:2] == ("finished", 0)
    assert record_in(run_dir)["steps"] == 3


def test_uninstrument_on_another_thread_removes_the_sigterm_watch(run_dir: Path) -> None:
    code = """
thread = threading.Thread(target=rankscope.uninstrument)
thread.start()
thread.join()
"""
    # One of these gets the number of the watch's descriptor.
    files = "held = [open(os.environ['RANKSCOPE_RUN_DIR'] + f'/precious{n}', 'w') for n in range(9)]\n"
    with job(WAIT, setup=code + files) as process:
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert [path.read_text() for path in run_dir.glob("precious*")] == [""] * 9


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(("argument", "reason"), [("fine", "finished"), ("bad", "exception")])
def test_the_end_of_ranks_started_by_multiprocessing_is_recorded(
    run_dir: Path, tmp_path: Path, method: str, argument: str, reason: str
) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    subprocess.run([sys.executable, str(script), method, argument], env=watched(), check=False, capture_output=True)
    assert record_in(run_dir).exit_reason == reason


def train(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(python(TRAIN), env=environment, check=True, capture_output=True, text=True)


def test_the_next_start_of_a_rank_replaces_only_its_own_record(tmp_path: Path) -> None:
    run_dir = tmp_path / "not" / "yet"  # is created
    for run, rank in (("v1.0", "3"), ("v1", "0"), ("v1", "0")):
        train(watched(RANKSCOPE_RUN=run, RANK=rank, RANKSCOPE_RUN_DIR=str(run_dir)))
    assert len(list(run_dir.glob("*.rank"))) == 2


def test_a_warm_up_before_the_process_group_is_not_published(run_dir: Path) -> None:
    train(watched(WORLD_SIZE="2"))
    assert list(run_dir.iterdir()) == []


def test_nothing_happens_unless_the_hook_is_enabled(run_dir: Path) -> None:
    train({**os.environ})
    assert list(run_dir.iterdir()) == []
