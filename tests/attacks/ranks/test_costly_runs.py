"""Attack: as many runs of as many owners as a page has ranks, to use the exporter's memory and CPU time.

A control has as many honest runs of other users. The victim's run has a finding all the time.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from testing.processes import MEBIBYTE, resident_bytes
from testing.programs import Program, running
from testing.servers import Server, free_port
from tests.attacks.users import MALLORY, VICTIM, needs_root

pytestmark = needs_root
SCRAPES = 16
MEMORY, SCRAPE_SECONDS, CORES = 150 * MEBIBYTE, 0.5, 0.2
FINDING = re.compile(rf'^rankscope_finding_ratio{{[^}}]*kind="straggler",[^}}]*owner="{VICTIM}"', re.M)
JUDGED = re.compile(rf'^rankscope_run_judged_info{{[^}}]*owner="{VICTIM}"', re.M)
SHOWN = re.compile(rf'^rankscope_rank_up{{[^}}]*owner="{VICTIM}"', re.M)
READ = 'rankscope_exporter_collector_success{collector="findings"} 1'
NOT_JUDGED = "rankscope_exporter_runs_not_judged{"
LONGEST = 10 * SCRAPES
"""Seconds until so many pages have results of the diagnosis, which other programs on this machine may delay."""
CROWDS = {
    "control": (MALLORY, 3, 10, 4, "honest"),
    "owners who change": (200_000, 240, 1, 1, "hostile", 2),
    "costly records": (MALLORY, 3, 10, 4, "hostile"),
}
DIAGNOSIS = "ranks-findings"
NAMED = """
import threading
from rankscope_exporter.__main__ import main

def run(thread, run=threading.Thread.run):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(thread.name)
    run(thread)

threading.Thread.run = run
main()
"""
"""The exporter. Its threads have their names in the kernel, too."""


class Observed(NamedTuple):
    """The exporter while a crowd writes records."""

    durations: Sequence[float]
    pages: Sequence[str]
    cpu_seconds: Sequence[float]
    """The CPU time of the diagnosis at each page."""
    largest: int
    """The most memory of the exporter, in bytes."""


@contextmanager
def crowd(directory: Path, *arguments: object) -> Iterator[Program]:
    with running(sys.executable, "-m", "testing.crowd", directory, *arguments) as program:
        yield program


@contextmanager
def exporter(run_dir: Path, tmp_path: Path) -> Iterator[Server]:
    url = f"http://127.0.0.1:{free_port()}"
    state = tmp_path / "state"
    state.mkdir()
    flags = (f"--web.listen-address={url[7:]}", f"--run-dir={run_dir}", f"--state-dir={state}")
    with Server("exporter", [sys.executable, "-c", NAMED, *flags], url, tmp_path / "log") as server:
        yield server


def scrape(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the diagnosis' thread."""
    (task,) = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == DIAGNOSIS]
    return int((task / "schedstat").read_text().split()[0]) / 1e9


@pytest.fixture(scope="module", params=CROWDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def observed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Scrape the exporter each second while a crowd of this kind writes records next to the victim's."""
    durations, pages, spent = [], [], []
    with tempfile.TemporaryDirectory(prefix="rankscope-test-", dir="/dev/shm") as directory:
        run_dir = Path(directory)
        run_dir.chmod(0o1777)
        with (
            crowd(run_dir, VICTIM, 1, 1, 4, "victim"),
            exporter(run_dir, tmp_path_factory.mktemp("exporter")) as server,
        ):
            assert server.pid is not None
            while not FINDING.search(scrape(server)):
                time.sleep(1)
            with crowd(run_dir, *CROWDS[kind]):
                until = time.monotonic() + LONGEST
                while len(pages) < SCRAPES and time.monotonic() < until:
                    time.sleep(1)
                    began = time.monotonic()
                    page = scrape(server)
                    durations.append(time.monotonic() - began)
                    if READ in page:
                        pages.append(page)
                        spent.append(cpu_seconds(server.pid))
            yield Observed(durations, pages, spent, resident_bytes(server.pid, "VmHWM"))


def test_the_victims_finding_stays(observed: Observed) -> None:
    assert len(observed.pages) == SCRAPES
    for page in observed.pages:
        assert len(SHOWN.findall(page)) == 4
        assert FINDING.search(page)
        assert JUDGED.search(page)


def test_memory_and_scrapes_are_bounded(observed: Observed) -> None:
    assert observed.largest <= MEMORY
    assert statistics.median(observed.durations) <= SCRAPE_SECONDS


def test_the_diagnosis_takes_a_limited_share_of_a_core(observed: Observed) -> None:
    half = observed.cpu_seconds[len(observed.cpu_seconds) // 2 :]
    assert (half[-1] - half[0]) / (len(half) - 1) <= CORES


def test_honest_runs_are_all_judged(observed: Observed, kind: str) -> None:
    if kind == "control":
        assert NOT_JUDGED not in observed.pages[-1]
        assert observed.pages[-1].count("rankscope_run_judged_info{") == 1 + 3 * 10
