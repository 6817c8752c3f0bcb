"""How a rank ended stands in its record: clean, by an exception, by SIGTERM, or without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot

TRAIN = """
import os, sys, threading
import torch
weights = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
weights(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("trained", flush=True)
"""
WAIT = "sys.stdin.read()\n"
OWN_FAULTHANDLER = "faulthandler.register(signal.SIGTERM, chain=False)"
SPAWNED = """
import multiprocessing, sys

def train(argument):
    import torch
    weights = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    weights(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if argument == "bad":
        raise RuntimeError(argument)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(sys.argv[2],))
    process.start()
    process.join()
"""


@contextmanager
def job(run_dir: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A script that trains a step, started without a change to it, at the point where it says so."""
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", "RANKSCOPE_RUN_DIR": str(run_dir)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TRAIN + code], env=environment, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "trained\n"
            yield process
        finally:
            process.kill()


def record_in(run_dir: Path) -> RankSnapshot:
    (path,) = run_dir.glob("*.rank")
    return read_rank(path)


def test_a_clean_exit_is_finished(run_dir: Path) -> None:
    with job(run_dir, "") as process:
        process.wait()
    assert record_in(run_dir).exit_reason == "finished"


def test_an_uncaught_exception_is_an_exception_and_still_printed(run_dir: Path) -> None:
    with job(run_dir, "raise KeyError('lost')") as process:
        _, errors = process.communicate()
    assert record_in(run_dir).exit_reason == "exception"
    assert "KeyError: 'lost'" in errors
    assert process.returncode == 1


@pytest.mark.parametrize("code", [WAIT, "threading.Event().wait()", "import time; time.sleep(600)"])
def test_sigterm_is_a_planned_stop_even_while_blocked(run_dir: Path, code: str) -> None:
    with job(run_dir, code) as process:
        assert record_in(run_dir).alive
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert record_in(run_dir).exit_reason == "sigterm"


def test_a_handler_of_the_jobs_own_still_handles_sigterm(run_dir: Path) -> None:
    handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True)\n"
    with job(run_dir, handler + WAIT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait() == 7
    assert record_in(run_dir).exit_reason == "finished"


def test_sigkill_leaves_no_word(run_dir: Path) -> None:
    with job(run_dir, WAIT) as process:
        process.kill()
        process.wait()
    assert record_in(run_dir).exit_reason == "killed"


def test_a_forked_child_neither_ends_nor_keeps_alive_its_parents_record(run_dir: Path) -> None:
    forked = """
import signal, time
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)
helper = os.fork()
if helper == 0:
    time.sleep(600)
print(helper, flush=True)
"""
    with job(run_dir, forked + WAIT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        helper = int(process.stdout.readline())
        assert record_in(run_dir).alive
        assert record_in(run_dir).last_words_at is None
        process.kill()
        process.wait()
        assert record_in(run_dir).exit_reason == "killed"
        os.kill(helper, signal.SIGKILL)


def test_a_sigterm_handler_that_the_job_set_after_us_outlives_uninstrument(run_dir: Path) -> None:
    code = """
import rankscope, signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
rankscope.uninstrument()
print("ready", flush=True)
"""
    with job(run_dir, code + WAIT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait() == 7


def test_a_child_keeps_the_sigterm_handler_that_its_parent_set_after_us(run_dir: Path) -> None:
    forked = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
child = os.fork()
if child == 0:
    print("ready", flush=True)
    time.sleep(600)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    with job(run_dir, "print(os.getpid(), flush=True)" + forked) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.stdout.readline() == "9\n"


def test_a_faulthandler_that_the_job_registered_first_is_left_alone(run_dir: Path) -> None:
    code = "import faulthandler, signal\n" + OWN_FAULTHANDLER + "\n" + TRAIN
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN_DIR": str(run_dir)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", code + WAIT]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Current thread" in errors


def test_ctrl_c_is_an_interruption(run_dir: Path) -> None:
    with job(run_dir, WAIT) as process:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert record_in(run_dir).exit_reason == "interrupted"


def test_an_exception_is_seen_past_an_excepthook_that_does_not_hand_on(run_dir: Path) -> None:
    with job(run_dir, "sys.excepthook = lambda *_: None\nraise KeyError('lost')") as process:
        process.communicate()
    assert record_in(run_dir).exit_reason == "exception"


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(("argument", "reason"), [("fine", "finished"), ("bad", "exception")])
def test_ranks_that_multiprocessing_started_end_as_they_did(
    run_dir: Path, tmp_path: Path, method: str, argument: str, reason: str
) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN_DIR": str(run_dir)}
    subprocess.run([sys.executable, str(script), method, argument], env=environment, check=False, capture_output=True)
    assert record_in(run_dir).exit_reason == reason


def test_a_rank_does_not_remove_the_records_of_a_run_with_a_similar_name(run_dir: Path) -> None:
    for run, rank in (("v1.0", "3"), ("v1", "0")):
        environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": run, "RANK": rank}
        environment["RANKSCOPE_RUN_DIR"] = str(run_dir)
        subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True)
    assert len(list(run_dir.glob("*.rank"))) == 2


def test_a_warm_up_before_the_process_group_does_not_publish_a_rank_on_its_own(run_dir: Path) -> None:
    environment = {**os.environ, "RANKSCOPE": "1", "WORLD_SIZE": "2", "RANKSCOPE_RUN_DIR": str(run_dir)}
    subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True)
    assert list(run_dir.iterdir()) == []


def test_nothing_happens_without_being_asked_for(run_dir: Path) -> None:
    environment = {**os.environ, "RANKSCOPE_RUN_DIR": str(run_dir)}
    subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True)
    assert list(run_dir.iterdir()) == []


def test_the_next_start_of_a_run_removes_what_its_rank_left(run_dir: Path) -> None:
    for _ in range(2):
        with job(run_dir, "") as process:
            process.wait()
    assert len(list(run_dir.glob("*.rank"))) == 1


def test_a_directory_that_is_named_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "not" / "yet"
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_QUIET": "1", "RANKSCOPE_RUN_DIR": str(run_dir)}
    process = subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True, capture_output=True, text=True)
    assert len(list(run_dir.glob("*.rank"))) == 1
    assert "rankscope" not in process.stderr
