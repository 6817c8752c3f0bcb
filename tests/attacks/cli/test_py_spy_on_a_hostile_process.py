"""The attack: a process that makes py-spy print escapes, print forever, or never end."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.waiting import eventually
from tests.attacks.cli_support import ask, process

from rankscope.cli import living_ranks, py_spy, rank_stacks, show_stacks

MIB = 1024**2
RANK = 'w = publish("e.0"); live()'


def fake(directory: Path, script: str) -> str:
    program = directory / "py-spy"
    program.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    program.chmod(0o755)
    return str(directory)


def test_names_of_threads_and_functions_are_printed_escaped(run_dir: Path, tmp_path: Path) -> None:
    path = fake(tmp_path, r"""printf 'Thread 1 (idle): "\033]0;owned\007"\n    \302\2332Jloop (\033[2Ja.py:1)\r\n'""")
    with process(RANK, run_dir, user=0):
        answer = ask(run_dir, path=path)
    assert answer.returncode == 0
    assert all(line.isprintable() for line in answer.stdout.split("\n"))
    assert r"\x9b2Jloop" in answer.stdout


def test_output_without_end_is_cut_off(run_dir: Path, tmp_path: Path) -> None:
    path = fake(tmp_path, f"head -c {64 * MIB} /dev/zero | tr '\\0' x")
    with process(RANK, run_dir, user=0):
        answer = ask(run_dir, path=path)
    assert len(answer.stdout) < 2 * MIB
    assert f"(cut off after {MIB} bytes)" in answer.stdout


def test_one_that_never_ends_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    monkeypatch.setenv("PATH", fake(tmp_path, f"sleep 600 & echo $! > {child}; echo begun; wait"))
    monkeypatch.setattr(py_spy, "WITHIN", 1.0)
    assert py_spy.stacks_by_py_spy(1, limit=MIB) == ""
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    # A zombie is init's to collect.
    eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", seconds=10)


def test_after_a_partial_answer_and_an_error_the_hook_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake(tmp_path, "echo half; exit 1"))
    assert py_spy.stacks_by_py_spy(1, limit=MIB) == ""


def test_slow_ranks_of_one_user_delay_no_ranks_of_others(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_stacks, "stacks", lambda rank, **_: f"asked of {rank.owner}")
    with process('w = [publish(f"e.{n}", rank=str(n)) for n in range(2)]; live()', run_dir, user=0):
        found = [
            living_ranks.RecordedRank(one.snapshot, owner)
            for owner in (1, 2)
            for one in show_stacks.ranks_in([run_dir])
        ]
    spent = iter(range(100))
    monkeypatch.setattr(rank_stacks.time, "monotonic", lambda: float(next(spent)))
    asked = [(one.owner, one.text, one.reason) for one in rank_stacks.ask_all(found, 1.0)]
    skipped = "skipped: other ranks of the same user took 1 s"
    assert asked == [(1, "asked of 1", ""), (1, "", skipped), (2, "asked of 2", ""), (2, "", skipped)]
