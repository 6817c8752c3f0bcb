"""The attack: names, directories and commands that terminal, file system or kernel cannot handle."""

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
    """Return the line on stderr after argparse's usage."""
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
def test_stacks_names_an_invalid_run_directory_in_one_line(directory: str) -> None:
    answer = rankscope("stacks", RANKSCOPE_RUN_DIR=directory)
    assert only_line(answer).startswith("rankscope stacks: ")


@pytest.mark.parametrize("name", [ESCAPES, "\udcff", "x" * 100_000, "../../etc"])
def test_stacks_of_an_unknown_run_is_one_line(run_dir: Path, name: str) -> None:
    assert only_line(rankscope("stacks", f"--run={name}")).startswith("rankscope stacks: no living rank of run ")


def test_a_name_outside_the_terminals_encoding_is_printed(run_dir: Path) -> None:
    with living_rank(run_dir, run="gr\u00f6\u00dfer"):
        answer = rankscope("stacks", PYTHONIOENCODING="ascii", PATH="/nowhere")
    assert "Traceback" not in answer.stderr
    assert r"=== run gr\xf6\xdfer: 1 rank" in answer.stdout


@pytest.mark.parametrize("name", [ESCAPES, "a\nb", "\udcff"])
def test_run_refuses_a_name_that_no_exporter_shows(name: str) -> None:
    assert "is not printable" in only_line(rankscope("run", f"--run={name}", "--", "true"))


def test_a_job_with_such_a_name_in_its_environment_starts_with_a_warning() -> None:
    answer = rankscope("run", "--", "sh", "-c", "echo started", RANKSCOPE_RUN=ESCAPES)
    assert (answer.returncode, answer.stdout) == (0, "started\n")
    assert answer.stderr.count("\n") == 1
    assert answer.stderr[:-1].isprintable()
    assert "no exporter will show this run" in answer.stderr


def test_run_names_in_one_line_what_the_kernel_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "job").chmod(0o755)
    assert only_line(rankscope("run", "--", str(tmp_path / "job"))).endswith("Exec format error")
    # The kernel accepts at most 131,071 bytes as one argument, or as a variable with its name.
    too_long = "x" * (131_071 - len("--run="))
    assert only_line(rankscope("run", f"--run={too_long}", "--", "true")).endswith("Argument list too long")


def test_run_names_an_unknown_command_in_one_line() -> None:
    assert "no such command" in only_line(rankscope("run", "--", f"{ESCAPES}"))


def test_arguments_of_a_job_are_passed_unchanged() -> None:
    odd = ["$(touch owned)", "a b", "--", "-n", "\udcff", "*"]
    answer = rankscope("run", "--run=r", "--", sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *odd)
    assert answer.stdout == f"{odd!a}\n"
