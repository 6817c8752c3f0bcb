"""`rankscope stacks`: every thread of every living rank, also of a stuck one, and nobody is harmed by the question."""

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

from rankscope.cli import stacks
from rankscope.process.stack_dump import SIGNAL, StackDump
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope.record.writer import RankWriter

TRAIN = """
import os, re, signal, sys, threading, time
import torch
weights = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
weights(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
LISTEN = """
def loiter():
    print("trained", flush=True)
    while sys.stdin.readline():
        print("still here", flush=True)
loiter()
"""
# The matching takes for ever, in one C call that never lets go of the GIL.
STUCK_IN_C = """
def hopeless():
    print("trained", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")
hopeless()
"""
WITHOUT_HANDLER = """
import json, os, sys
from pathlib import Path
from rankscope.record.writer import RankWriter
answer = {"signal": int(sys.argv[2]), "descriptor": os.memfd_create(sys.argv[3])}
writer = RankWriter()
writer.publish(Path(sys.argv[1]), "r.0", {"run": "r", "rank": "0", "pid": "1", "stacks": answer})
print("trained", flush=True)
while sys.stdin.readline():
    print("still here", flush=True)
"""


@contextmanager
def process(command: list[str], run_dir: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """One that has come to where it says that it has trained."""
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", "RANKSCOPE_RUN_DIR": str(run_dir)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", *command], env=environment | variables, text=True, **pipes) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "trained\n"
            yield started
        finally:
            started.kill()


def is_still_here(job: subprocess.Popen[str]) -> bool:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write("\n")
    job.stdin.flush()
    return job.stdout.readline() == "still here\n"


def ask(run_dir: Path, *flags: str, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """The command; `path` is where it may find py-spy."""
    command = [sys.executable, "-m", "rankscope.cli.launch", "stacks", f"--run-dir={run_dir}", *flags]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_waiting_rank_answers_with_all_its_threads_and_goes_on(run_dir: Path) -> None:
    thread = "def beside():\n    time.sleep(600)\nthreading.Thread(target=beside, daemon=True).start()\n"
    with process([TRAIN + thread + LISTEN], run_dir) as job:
        answers = [ask(run_dir) for _ in range(2)]
        assert is_still_here(job)
    for answer in answers:
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith(f"=== run job, rank 0, pid {job.pid}: other for ")
        assert answer.stdout.count("in loiter") == answer.stdout.count("in beside") == 1


def test_a_rank_that_is_stuck_in_a_c_call_answers_too(run_dir: Path) -> None:
    with process([TRAIN + STUCK_IN_C], run_dir):
        answer = ask(run_dir)
    assert "in hopeless" in answer.stdout


def test_py_spy_is_asked_first_where_it_is_installed_and_permitted(run_dir: Path) -> None:
    path = str(Path(sys.executable).parent)
    with process([TRAIN + LISTEN], run_dir) as job:
        permitted = subprocess.run([f"{path}/py-spy", "dump", "--pid", str(job.pid)], capture_output=True, check=False)
        answer = ask(run_dir, path=path)
        assert is_still_here(job)
    assert answer.returncode == 0
    assert "loiter" in answer.stdout
    assert ("Python v3" in answer.stdout) == (permitted.returncode == 0)


def test_a_py_spy_that_may_not_look_is_done_without(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    with process([TRAIN + LISTEN], run_dir):
        answer = ask(run_dir, path=str(tmp_path))
    assert "in loiter" in answer.stdout


def test_only_the_ranks_that_are_asked_for_answer(run_dir: Path) -> None:
    with process([TRAIN + LISTEN], run_dir, RANK="0"), process([TRAIN + LISTEN], run_dir, RANK="1"):
        everybody, one = ask(run_dir), ask(run_dir, "--run=job", "--rank=1")
    assert [line.split(",")[1] for line in everybody.stdout.splitlines() if "===" in line] == [" rank 0", " rank 1"]
    assert [line.split(",")[1] for line in one.stdout.splitlines() if "===" in line] == [" rank 1"]


def test_without_a_living_rank_it_says_so_and_exits_with_2(run_dir: Path) -> None:
    answer = ask(run_dir, "--run=job", "--rank=7")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"rankscope stacks: no living rank 7 of run job in {run_dir}\n"


def test_a_rank_that_is_not_there_is_an_error_with_those_that_are(run_dir: Path) -> None:
    with process([TRAIN + LISTEN], run_dir, RANK="1", RANKSCOPE_RUN="a\x1b[2Jb"):
        answer = ask(run_dir, "--rank=7")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.endswith(f"no living rank 7 in {run_dir}; there are: a?[2Jb rank 1\n")


def test_whoever_reads_only_its_beginning_gets_no_traceback(run_dir: Path) -> None:
    command = f"{sys.executable} -m rankscope.cli.launch stacks --run-dir={run_dir} | true"
    with process([TRAIN + LISTEN], run_dir):
        script = f"set -o pipefail; {command}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (int(SIGNAL), "rankscope-stacks", "no longer handles signal"),
        (int(SIGNAL), "something-else", "no longer has the file"),
        (int(signal.SIGKILL), "rankscope-stacks", "no signal for them"),
        (int(signal.SIGUSR1), "rankscope-stacks", "no signal for them"),
    ],
)
def test_a_process_that_the_signal_would_kill_never_gets_it(run_dir: Path, number: int, name: str, reason: str) -> None:
    with process([WITHOUT_HANDLER, str(run_dir), str(number), name], run_dir) as bystander:
        answer = ask(run_dir)
        assert is_still_here(bystander)
    assert answer.returncode == 1
    assert reason in answer.stdout


@pytest.mark.parametrize("dump", [None, [], {}, {"signal": "44", "descriptor": 3}, {"signal": 44}, "x"])
def test_a_record_that_says_nothing_useful_of_stacks_is_no_error(run_dir: Path, dump: object) -> None:
    writer = RankWriter()
    writer.publish(run_dir, "r.0", {"run": "r", "rank": "0", "stacks": dump})
    with pytest.raises(stacks.NoStacksError, match="no signal for them"):
        stacks._asked_by(read_rank(run_dir / "r.0.rank"))


def test_a_signal_that_the_job_handles_is_left_to_it(run_dir: Path) -> None:
    own = f"import signal\nsignal.signal({int(SIGNAL)}, lambda *_: None)\n"
    with process([own + TRAIN + LISTEN], run_dir) as job:
        assert read_rank(next(run_dir.glob("*.rank"))).info["stacks"] == {}
        assert ask(run_dir).returncode == 1
        assert is_still_here(job)


def test_a_stopped_rank_is_named_and_not_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", 0.3)
    with process([TRAIN + LISTEN], run_dir) as job:
        job.send_signal(signal.SIGSTOP)
        assert stacks.show(None, None, run_dir, sys.stdout) == 1
        job.send_signal(signal.SIGCONT)
        assert is_still_here(job)
    assert "the process is stopped" in capsys.readouterr().out


def test_a_forked_child_answers_no_more_and_its_parent_still_does(run_dir: Path) -> None:
    forked = """
child = os.fork()
if child == 0:
    time.sleep(600)
"""
    with process([TRAIN + forked + LISTEN], run_dir) as job:
        (child,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        until = time.monotonic() + 60
        while stacks.catches(child, SIGNAL):  # its parent may have gone on before the child had a processor
            assert time.monotonic() < until, "the child kept its parent's handler"
            time.sleep(0.01)
        assert stacks.catches(job.pid, SIGNAL)
        answer = ask(run_dir)
        os.kill(child, signal.SIGKILL)
    assert "in loiter" in answer.stdout


def test_uninstrument_gives_the_signal_and_the_descriptor_back(run_dir: Path) -> None:
    code = "import rankscope\nrankscope.uninstrument()\n"
    with process([TRAIN + code + LISTEN], run_dir) as job:
        assert not stacks.catches(job.pid, SIGNAL)
        assert not [fd for fd in Path(f"/proc/{job.pid}/fd").iterdir() if "memfd" in str(fd.readlink())]


def test_a_handler_that_the_job_set_since_outlives_it() -> None:
    dump = StackDump()
    dump.watch()
    assert dump.info["signal"] == SIGNAL
    try:
        caught: list[int] = []
        signal.signal(SIGNAL, lambda number, _: caught.append(number))
        dump.forget()
        assert dump.info == {}
        signal.raise_signal(SIGNAL)
        assert caught == [SIGNAL]
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL)


def test_the_heading_names_the_collective_that_is_open(run_dir: Path) -> None:
    writer = RankWriter()
    writer.publish(run_dir, "r.0", {"run": "r", "rank": "0", "pid": "7", "groups": ["0-3", "0,2"]})
    for field, value in (("steps", 41), ("phase", layout.COLLECTIVE_WAIT), ("collective_group", 1)):
        writer.slots[INDEX[field]] = value
    assert ", in " not in stacks.heading(read_rank(run_dir / "r.0.rank"))
    writer.slots[INDEX["collective_op"]] = layout.OPS.index("all_gather") + 1
    writer.slots[INDEX["group_collectives"] + 1] = 17
    heading = stacks.heading(read_rank(run_dir / "r.0.rank"))
    assert heading.startswith("=== run r, rank 0, pid 7: collective_wait for ")
    assert heading.endswith(" s, step 41, in all_gather with 0,2, number 17")
