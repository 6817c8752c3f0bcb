"""The attack: names, directories and commands of the environment that no terminal, file system or kernel takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testing.records import living_rank

ESCAPES = "\x1b]0;owned\x07\n\u202e"


def rankscope(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope.cli.launch", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def only_line(answer: subprocess.CompletedProcess[str]) -> str:
    """What it says on stderr, after argparse's usage."""
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    line = answer.stderr.splitlines()[-1]
    assert answer.stderr.isascii() or line.isprintable()
    assert "\x1b" not in answer.stderr
    return line


@pytest.mark.parametrize(
    "directory", ["/nowhere", "/dev/null", "/dev/zero", "x" * 5000, "/" + "x" * 300, ESCAPES, "\udcff", "/proc/1/mem"]
)
def test_stacks_says_in_a_line_what_is_no_run_directory(directory: str) -> None:
    answer = rankscope("stacks", RANKSCOPE_RUN_DIR=directory)
    assert only_line(answer).startswith("rankscope stacks: ")


@pytest.mark.parametrize("name", [ESCAPES, "\udcff", "x" * 100_000, "../../etc"])
def test_stacks_of_a_run_that_is_not_there_is_a_line(run_dir: Path, name: str) -> None:
    assert only_line(rankscope("stacks", f"--run={name}")).startswith("rankscope stacks: no living rank of run ")


def test_a_name_that_the_terminal_has_no_letters_for_is_printed(run_dir: Path) -> None:
    with living_rank(run_dir, run="gr\u00f6\u00dfer"):
        answer = rankscope("stacks", PYTHONIOENCODING="ascii", PATH="/nowhere")
    assert "Traceback" not in answer.stderr
    assert r"=== run gr\xf6\xdfer, rank 0" in answer.stdout


@pytest.mark.parametrize("name", [ESCAPES, "a\nb", "\udcff"])
def test_run_refuses_a_name_that_no_exporter_shows(name: str) -> None:
    assert "is not printable" in only_line(rankscope("run", f"--run={name}", "--", "true"))


def test_a_job_with_such_a_name_in_its_environment_is_started_all_the_same_and_told() -> None:
    answer = rankscope("run", "--", "sh", "-c", "echo started", RANKSCOPE_RUN=ESCAPES)
    assert (answer.returncode, answer.stdout) == (0, "started\n")
    assert answer.stderr.count("\n") == 1
    assert answer.stderr[:-1].isprintable()
    assert "no exporter will show this run" in answer.stderr


def test_run_says_in_a_line_what_the_kernel_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "job").chmod(0o755)
    assert only_line(rankscope("run", "--", str(tmp_path / "job"))).endswith("Exec format error")
    # 131,071 bytes are the most that the kernel takes as one argument, or as a variable with its name.
    too_long = "x" * (131_071 - len("--run="))
    assert only_line(rankscope("run", f"--run={too_long}", "--", "true")).endswith("Argument list too long")


def test_run_says_in_a_line_what_is_no_command() -> None:
    assert "no such command" in only_line(rankscope("run", "--", f"{ESCAPES}"))


def test_what_a_job_is_started_with_is_passed_on_as_it_is() -> None:
    odd = ["$(touch owned)", "a b", "--", "-n", "\udcff", "*"]
    answer = rankscope("run", "--run=r", "--", sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *odd)
    assert answer.stdout == f"{odd!a}\n"
