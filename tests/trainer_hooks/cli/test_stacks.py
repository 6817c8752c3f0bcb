"""`rankscope stacks`: it shows all threads of all living ranks, also of stuck ones, and harms none of them."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from testing.programs import Program, python, running
from testing.records import publish
from testing.waiting import eventually
from tests.attacks.cli_support import ask
from tests.trainer_hooks.scripts import TRAIN, WITHOUT_TORCH, watched

from rankscope.cli import stacks
from rankscope.cli.living_ranks import RecordedRank, all_ranks
from rankscope.cli.rank_stacks import read_rank_stacks
from rankscope.cli.show_stacks import show
from rankscope.cli.stacks_page import lines
from rankscope.process.stack_dump import SIGNAL, StackDump
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.reader import read_rank
from rankscope.record.stopped import is_stopped

LISTEN = """
def loiter():
    print("ready", flush=True)
    while sys.stdin.readline():
        print("still here", flush=True)
loiter()
"""
# This match never ends: one C call that never releases the GIL.
STUCK_IN_C = """
def match_forever():
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")
match_forever()
"""
WITHOUT_HANDLER = """
dump.forget()
writer.write_info({**info, "stacks": {"signal": int(sys.argv[1]), "descriptor": os.memfd_create(sys.argv[2])}})
"""


@contextmanager
def process(code: str, *arguments: object, **variables: str) -> Iterator[Program]:
    """Start a watched script."""
    with running(*python(code, *arguments), env=watched(**variables)) as started:
        yield started


def is_still_here(job: Program) -> bool:
    return job.ask("") == "still here"


def test_a_waiting_rank_answers_with_all_its_threads_and_continues(run_dir: Path) -> None:
    thread = "def helper():\n    time.sleep(600)\nthreading.Thread(target=helper, daemon=True).start()\n"
    with process(TRAIN + thread + LISTEN) as job:
        answers = [ask(run_dir) for _ in range(2)]
        assert is_still_here(job)
    for answer in answers:
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith("Rank 0 stands in <string>")
        assert f"\nRank 0: pid {job.pid}, other for " in answer.stdout
        assert answer.stdout.count("in loiter\n") == answer.stdout.count("in helper\n") == 1


def test_answers_that_were_read_take_no_memory_of_the_job(run_dir: Path) -> None:
    with process(WITHOUT_TORCH + LISTEN) as job:
        [rank] = all_ranks(run_dir)
        [file] = [fd for fd in Path(f"/proc/{job.pid}/fd").iterdir() if "rankscope-stacks" in str(fd.readlink())]
        allocated = []
        while file.stat().st_size < 4 * mmap.PAGESIZE:
            assert "in loiter" in stacks.stacks(rank, with_py_spy=False)
            allocated.append(file.stat().st_blocks * 512)
        assert is_still_here(job)
    assert max(allocated) <= mmap.PAGESIZE


def test_a_rank_that_is_stuck_in_a_c_call_answers_too(run_dir: Path) -> None:
    with process(WITHOUT_TORCH + STUCK_IN_C):
        answer = ask(run_dir)
    assert "in match_forever" in answer.stdout


def test_py_spy_is_used_if_it_is_installed_and_permitted(run_dir: Path) -> None:
    path = str(Path(sys.executable).parent)
    with process(WITHOUT_TORCH + LISTEN) as job:
        permitted = subprocess.run([f"{path}/py-spy", "dump", "--pid", str(job.pid)], capture_output=True, check=False)
        answer = ask(run_dir, path=path)
        assert is_still_here(job)
    assert answer.returncode == 0
    assert "in loiter" in answer.stdout
    assert ("  idle threads: " in answer.stdout) == (permitted.returncode != 0)


def test_the_hook_answers_if_py_spy_is_not_permitted(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    with process(WITHOUT_TORCH + LISTEN):
        answer = ask(run_dir, path=str(tmp_path))
    assert "in loiter" in answer.stdout


def test_only_the_selected_ranks_are_shown(run_dir: Path) -> None:
    with process(WITHOUT_TORCH + LISTEN, RANK="0"), process(WITHOUT_TORCH + LISTEN, RANK="1"):
        both, one = ask(run_dir), ask(run_dir, "--run=job", "--rank=1")
    assert re.findall(r"^Ranks? .*?(?=: pid)", both.stdout, re.MULTILINE) == ["Ranks 0-1 (2 ranks)"]
    assert re.findall(r"^Ranks? .*?(?=: pid)", one.stdout, re.MULTILINE) == ["Rank 1"]


def test_without_a_living_rank_it_prints_a_message_and_exits_with_2(run_dir: Path) -> None:
    answer = ask(run_dir, "--run=job", "--rank=7")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"rankscope stacks: no living rank 7 of run job in {run_dir}\n"


def test_an_unknown_rank_is_an_error_that_lists_the_available_ones(run_dir: Path) -> None:
    with process(TRAIN + LISTEN, RANK="1", RANKSCOPE_RUN="a\x1b[2Jb"):
        answer = ask(run_dir, "--rank=7")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.endswith(f"no living rank 7 in {run_dir}; available: a?[2Jb rank 1\n")


def test_a_closed_pipe_causes_no_traceback(run_dir: Path) -> None:
    command = f"{sys.executable} -m rankscope.cli.launch stacks --run-dir={run_dir} | true"
    with process(WITHOUT_TORCH + LISTEN):
        script = f"set -o pipefail; {command}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (int(SIGNAL), "rankscope-stacks", "no longer handles signal"),
        (int(SIGNAL), "something-else", "no longer has the file"),
        (int(signal.SIGKILL), "rankscope-stacks", "no signal for its stacks"),
        (int(signal.SIGUSR1), "rankscope-stacks", "no signal for its stacks"),
    ],
)
def test_a_process_that_the_signal_would_kill_never_gets_it(run_dir: Path, number: int, name: str, reason: str) -> None:
    with process(WITHOUT_TORCH + WITHOUT_HANDLER + LISTEN, number, name) as bystander:
        answer = ask(run_dir)
        assert is_still_here(bystander)
    assert answer.returncode == 1
    assert reason in answer.stdout


@pytest.mark.parametrize("dump", [None, [], {}, {"signal": "44", "descriptor": 3}, {"signal": 44}, "x"])
def test_a_record_without_valid_stacks_is_not_an_error(run_dir: Path, dump: object) -> None:
    _, path = publish(run_dir, stacks=dump)
    with pytest.raises(stacks.NoStacksError, match="no signal for its stacks"):
        stacks._signal_and_file(read_rank(path))


def test_a_signal_that_the_job_handles_is_not_used(run_dir: Path) -> None:
    own = f"import signal\nsignal.signal({int(SIGNAL)}, lambda *_: None)\n"
    with process(own + TRAIN + LISTEN) as job:
        assert read_rank(next(run_dir.glob("*.rank"))).info["stacks"] == {}
        assert ask(run_dir).returncode == 1
        assert is_still_here(job)


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_stopped_rank_gets_no_signal_and_is_said_to_be_stopped(run_dir: Path, is_installed: bool) -> None:
    path = str(Path(sys.executable).parent) if is_installed else "/nowhere"
    with process(WITHOUT_TORCH + LISTEN) as job:
        job.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(job.pid))
        answer = ask(run_dir, path=path)
        pending = Path(f"/proc/{job.pid}/status").read_text()
        job.send_signal(signal.SIGCONT)
        assert is_still_here(job)
    assert re.search(r"^ShdPnd:\s+0+$", pending, re.MULTILINE)
    where = r"(gives no stacks: |stands in <string>:\d+ in loiter, )"
    assert re.match(rf"Rank 0 {where}stopped by a signal \(state T\)\.\n", answer.stdout)


def test_a_rank_that_has_ended_is_named_if_another_one_is_alive(run_dir: Path) -> None:
    with process(TRAIN + LISTEN, RANK="0"):
        with process(TRAIN + LISTEN, RANK="1") as killed:
            killed.end()
        answer = ask(run_dir)
        only = ask(run_dir, "--rank=0")
    assert answer.returncode == 1
    assert answer.stdout.startswith("Rank 0 stands in <string>")
    assert "; rank 1 gives no stacks: it has ended (killed).\n" in answer.stdout
    assert f"\nRank 1: pid {killed.pid}, last in other, step 1\n" in answer.stdout
    assert "Rank 1" not in only.stdout


def test_a_rank_that_blocks_the_signal_is_reported_after_a_timeout(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", 0.3)
    with process(WITHOUT_TORCH + f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(SIGNAL)}])\n" + LISTEN) as job:
        assert show(None, None, run_dir, sys.stdout) == 1
        assert is_still_here(job)
    assert "no answer within 0.3 s (state S" in capsys.readouterr().out


def test_a_forked_child_does_not_answer_and_its_parent_still_does(run_dir: Path) -> None:
    forked = """
child = os.fork()
if child == 0:
    time.sleep(600)
"""
    with process(TRAIN + forked + LISTEN) as job:
        (child,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        # The parent may have continued before the child had CPU time.
        eventually(lambda: not stacks.catches(child, SIGNAL))
        assert stacks.catches(job.pid, SIGNAL)
        answer = ask(run_dir)
        os.kill(child, signal.SIGKILL)
    assert "in loiter" in answer.stdout


def test_uninstrument_releases_the_signal_and_the_descriptor(run_dir: Path) -> None:
    code = "import rankscope\nrankscope.uninstrument()\n"
    with process(TRAIN + code + LISTEN) as job:
        assert not stacks.catches(job.pid, SIGNAL)
        assert not [fd for fd in Path(f"/proc/{job.pid}/fd").iterdir() if "memfd" in str(fd.readlink())]


def test_a_handler_that_the_job_sets_later_is_kept() -> None:
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


def test_the_line_of_a_group_names_the_open_collective(run_dir: Path) -> None:
    slots = {"steps": 41, "phase": layout.COLLECTIVE_WAIT, "collective_group": 1}
    writer, path = publish(run_dir, slots=slots, pid="7", groups=["0-3", "0,2"])

    def line() -> str:
        rank = read_rank_stacks(RecordedRank(replace(read_rank(path), alive=True), 0), "", "a test")
        return next(line for line in lines([rank]) if line.startswith("Rank 0: "))

    assert ", in " not in line()
    writer.slots[INDEX["collective_op"]] = layout.OPS.index("all_gather") + 1
    writer.slots[INDEX["group_collectives"] + 1] = 17
    assert line().startswith("Rank 0: pid 7, collective_wait for ")
    assert line().endswith(" s, step 41, in all_gather of ranks 0,2, number 17")
