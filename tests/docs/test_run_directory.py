"""The help of each command, the documents and the deployments name the run directories of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.cli.launch import main
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR
from rankscope_exporter.config import parse

ROOT = Path(__file__).parents[2]
SLURM_DIR = "/run/rankscope-slurm"  # with the files of the prolog
RUN_DIRECTORY = re.compile(r"(?:/var)?/(?:run|tmp|dev/shm)/rankscope[\w-]*")
FILES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(
        path
        for folder in ("docs/install", "docs/runbooks", "deploy", "examples")
        for path in (ROOT / folder).rglob("*.*")
    ),
]


def help_of(*command: str) -> None:
    if command == ("rankscope-exporter",):
        parse({}, ["--help"])
    main([*command[1:], "--help"])


@pytest.mark.parametrize(
    "command", ["rankscope-exporter", *(f"rankscope {name}" for name in ("run", "stacks", "top", "hang"))]
)
def test_the_help_of_a_command_names_the_run_directories(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        help_of(*command.split())
    (default,) = re.findall(r"--run-dir DIR .*\(default: (.*)\)", capsys.readouterr().out)
    assert re.fullmatch(rf"\$RANKSCOPE_RUN_DIR, else {SYSTEM_RUN_DIR} (and|or) {SHARED_MEMORY_RUN_DIR}", default)


def test_documents_and_deployments_name_the_run_directories() -> None:
    named = {
        name for path in FILES if path.is_file() for name in RUN_DIRECTORY.findall(path.read_text("utf-8", "replace"))
    }
    assert named == {str(SYSTEM_RUN_DIR), str(SHARED_MEMORY_RUN_DIR), SLURM_DIR}
