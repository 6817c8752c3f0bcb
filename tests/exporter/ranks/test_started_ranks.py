"""A rank replaces another living one only if that one's process has started its process, by the kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testing.programs import Program, python, running
from testing.records import IMPORTS, LIVE, living_rank
from testing.waiting import eventually
from tests.attacks.users import needs_root

from rankscope_exporter.ranks.run_directory import RunDirectory

NAMESPACES = [
    pytest.param((), id="same_namespace"),
    pytest.param(("unshare", "--pid", "--fork", "--kill-child"), id="container", marks=needs_root),
]
# A shell is between the two, as a launcher would be.
STARTS_ANOTHER = f"""
import subprocess, threading

def start():
    while not (directory / "start").exists():
        time.sleep(0.01)
    other = json.dumps({{**info, "pid": "6"}}), (directory / "start").read_text()
    command = [sys.executable, "-c", {IMPORTS + LIVE!r}, str(directory), "r.0.6", *other]
    shell = ["sh", "-c", '"$@"; true', "sh", *command]
    subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE).stdout.readline()
    (directory / "started").touch()

threading.Thread(target=start, daemon=True).start()
"""


@contextmanager
def rank_that_starts_another(run_dir: Path, prefix: tuple[str, ...] = (), **slots: float) -> Iterator[Program]:
    """Start a rank with the pid 5 in its record. `start_another` lets it start one with the pid 6."""
    arguments = run_dir, "r.0.5", json.dumps({"pid": "5"}), json.dumps(slots)
    with running(*prefix, *python(IMPORTS + STARTS_ANOTHER + LIVE, *arguments)) as program:
        yield program


def start_another(run_dir: Path, **slots: float) -> None:
    (run_dir / "start.part").write_text(json.dumps(slots))
    (run_dir / "start.part").rename(run_dir / "start")
    eventually(lambda: (run_dir / "started").exists())


def shown(directory: RunDirectory) -> tuple[list[str], dict[str, int]]:
    """Return the pids in the shown records, and the number of skipped records by reason."""
    scan = directory.scan()
    return [rank.snapshot.info["pid"] for rank in scan.ranks], dict(scan.skipped)


@pytest.mark.parametrize("prefix", NAMESPACES)
def test_a_rank_that_another_one_started_replaces_it_once_it_has_steps(run_dir: Path, prefix: tuple[str, ...]) -> None:
    directory = RunDirectory([run_dir])
    with rank_that_starts_another(run_dir, prefix, steps=100.0):
        assert shown(directory) == (["5"], {})
        start_another(run_dir, steps=1.0)
        for known in (directory, RunDirectory([run_dir])):
            assert shown(known) == (["6"], {})


@pytest.mark.parametrize(("steps", "pid"), [(0.0, "6"), (100.0, "5")])
def test_a_rank_without_steps_replaces_only_one_without_steps(run_dir: Path, steps: float, pid: str) -> None:
    directory = RunDirectory([run_dir])
    with rank_that_starts_another(run_dir, steps=steps):
        directory.scan()
        start_another(run_dir)
        assert shown(directory) == ([pid], {})


@pytest.mark.parametrize("claims", [{}, {"parent": "5"}])
@pytest.mark.parametrize("steps", [0.0, 1e6])
def test_a_rank_of_another_process_does_not_replace_it(
    run_dir: Path, caplog: pytest.LogCaptureFixture, claims: dict[str, Any], steps: float
) -> None:
    directory = RunDirectory([run_dir])
    with living_rank(run_dir, "r.0.5", pid="5"):
        directory.scan()
        with living_rank(run_dir, "r.0.6", slots={"steps": steps, "started_unix": 1.0}, pid="6", **claims):
            assert shown(directory) == (["5"], {"duplicate": 1})
            assert "r.0.6.rank: pid 5 on  is shown as rank 0 of run r instead" in caplog.text
            assert shown(RunDirectory([run_dir])) == (["5"], {"duplicate": 1}), "after the exporter's restart"
    assert shown(directory)[0] == ["5"]


def test_a_rank_that_is_started_again_replaces_its_ended_one(run_dir: Path) -> None:
    directory = RunDirectory([run_dir])
    with living_rank(run_dir, "r.0.5", slots={"steps": 100.0}, pid="5") as first:
        directory.scan()
        first.end()
        with living_rank(run_dir, "r.0.6", pid="6"):
            assert shown(directory) == (["6"], {})
