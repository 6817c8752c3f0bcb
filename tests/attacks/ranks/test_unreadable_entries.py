"""Attack: a directory that can be listed but not entered, and exhausted descriptors, to hide all ranks."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

import pytest
from testing.users import NOBODY, become
from tests.attacks.ranks.ranks_support import clock, ended
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory

pytestmark = needs_root


def as_unprivileged_user(work: str) -> str:
    """Return the result of the work in a child that is not root, like the exporter."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(NOBODY)
            os.write(writing, WORK[work]().encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def text_of(scan: Scan) -> str:
    return f"{len(scan.ranks)} {dict(scan.skipped)}"


WORK = {}


@pytest.fixture
def directories(run_dir: Path) -> list[Path]:
    """Return a directory with three files that can be listed but not entered, and a readable one with a rank."""
    run_dir.chmod(0o1777)
    closed, readable = run_dir / "closed", run_dir / "readable"
    for one in (closed, readable):
        one.mkdir()
    for name in ("a", "b", "c"):
        (closed / f"{name}.rank").touch()
    os.chown(closed, MALLORY, MALLORY)
    closed.chmod(0o744)
    ended(readable, VICTIM, "mine")
    return [closed, readable]


def test_a_directory_that_cannot_be_entered_does_not_hide_ranks_in_another(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORK, "scan", lambda: text_of(RunDirectory(directories, clock).scan()))
    assert as_unprivileged_user("scan") == "1 {'unreadable': 3}"


def test_it_is_logged_once_for_the_directory(directories: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def logged() -> str:
        lines: list[str] = []
        monkeypatch.setattr(logging.Logger, "warning", lambda _, text, *values: lines.append(text % values))
        directory = RunDirectory(directories, clock)
        for _ in range(3):
            directory.scan()
        return "\n".join(lines)

    monkeypatch.setitem(WORK, "log", logged)
    line = as_unprivileged_user("log")
    assert line == f"skipped a file in the run directory: {directories[0]}: files in it: Permission denied"


def test_a_scan_without_free_descriptors_counts_it_and_the_next_one_works(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved() -> str:
        directory = RunDirectory(directories[1:], clock)
        before, (soft, hard) = text_of(directory.scan()), resource.getrlimit(resource.RLIMIT_NOFILE)
        # The directory can still be opened, but then no descriptor is left to list it or to open a file in it.
        for free in range(3):
            taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + free, hard))
            scan = directory.scan()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            list(map(os.close, taken))
            if free < 2 and not scan.skipped["unreadable"]:
                return f"with {free} descriptors: {text_of(scan)}"
        return f"{before}, then {text_of(directory.scan())}"

    monkeypatch.setitem(WORK, "starve", starved)
    assert as_unprivileged_user("starve") == "1 {}, then 1 {}"
