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

from rankscope.rank_reader import RankSnapshot, read_rank

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


@pytest.mark.parametrize("place", [WAIT, "threading.Event().wait()", "import time; time.sleep(600)"])
def test_sigterm_is_a_planned_stop_even_while_blocked(run_dir: Path, place: str) -> None:
    with job(run_dir, place) as process:
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


def test_nothing_happens_without_being_asked_for(run_dir: Path) -> None:
    environment = {**os.environ, "RANKSCOPE_RUN_DIR": str(run_dir)}
    subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True, capture_output=True)
    assert list(run_dir.iterdir()) == []


def test_the_next_start_of_a_run_removes_what_its_rank_left(run_dir: Path) -> None:
    for _ in range(2):
        with job(run_dir, "") as process:
            process.wait()
    assert len(list(run_dir.glob("*.rank"))) == 1
