"""Attack: as many runs of as many owners as a page has ranks, to use the exporter's memory and CPU time.

A control has as many honest runs of other users. The victim's run has a finding all the time.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testing.processes import MEBIBYTE, resident_bytes
from testing.programs import Program, running
from testing.servers import Server, free_port
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.config import parse
from rankscope_exporter.ranks.collectors.findings import Findings
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.watcher import PolledCollector, RankWatcher
from rankscope_exporter.registry import HELP, rank_collectors

pytestmark = needs_root
SCRAPES = 40
MEMORY, SCRAPE_SECONDS, CORES = 150 * MEBIBYTE, 0.5, 0.2
FINDING = re.compile(rf'^rankscope_finding_ratio{{[^}}]*kind="straggler",[^}}]*owner="{VICTIM}"', re.M)
JUDGED = re.compile(rf'^rankscope_run_judged_info{{[^}}]*owner="{VICTIM}"', re.M)
SHOWN = re.compile(rf'^rankscope_rank_up{{[^}}]*owner="{VICTIM}"', re.M)
READ = 'rankscope_exporter_collector_success{collector="findings"} 1'
LONGEST = 10 * SCRAPES
"""Seconds until so many pages have results of the diagnosis, which other programs on this machine may delay."""
CROWDS = {
    "control": (MALLORY, 4, 15, 4, "honest"),
    "owners who change": (200_000, 240, 1, 1, "hostile", 2),
    "costly records": (MALLORY, 4, 15, 4, "hostile"),
}


@contextmanager
def crowd(directory: Path, *arguments: object) -> Iterator[Program]:
    directory.chmod(0o1777)
    with running(sys.executable, "-m", "testing.crowd", directory, *arguments) as program:
        yield program


@contextmanager
def exporter(run_dir: Path, tmp_path: Path) -> Iterator[Server]:
    url = f"http://127.0.0.1:{free_port()}"
    state = tmp_path / "state"
    state.mkdir()
    flags = (f"--web.listen-address={url[7:]}", f"--run-dir={run_dir}", f"--state-dir={state}")
    server = Server("exporter", [sys.executable, "-m", "rankscope_exporter", *flags], url, tmp_path / "log")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def scrape(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("kind", CROWDS)
def test_the_victims_finding_stays_and_memory_and_scrapes_are_bounded(run_dir: Path, tmp_path: Path, kind: str) -> None:
    durations, pages = [], []
    with crowd(run_dir, VICTIM, 1, 1, 4, "victim"), exporter(run_dir, tmp_path) as server:
        while not FINDING.search(scrape(server)):
            time.sleep(1)
        with crowd(run_dir, *CROWDS[kind]):
            until = time.monotonic() + LONGEST
            while len(pages) < SCRAPES and time.monotonic() < until:
                time.sleep(1)
                began = time.monotonic()
                page = scrape(server)
                durations.append(time.monotonic() - began)
                pages += [page] if READ in page else []
        assert server.pid is not None
        assert resident_bytes(server.pid, "VmHWM") <= MEMORY
    assert statistics.median(durations) <= SCRAPE_SECONDS
    assert len(pages) == SCRAPES
    for page in pages:
        assert len(SHOWN.findall(page)) == 4
        assert FINDING.search(page)
        assert JUDGED.search(page)


def cpu_seconds(polled: PolledCollector) -> float:
    """Return the CPU time of the collector's thread."""
    assert polled._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(polled._thread.ident))


@pytest.mark.parametrize("kind", ["control", "costly records"])
def test_the_diagnosis_of_costly_records_takes_a_limited_share_of_a_core(run_dir: Path, kind: str) -> None:
    watcher = RankWatcher(RunDirectory([run_dir]), rank_collectors(parse(HELP, [], {}), lambda _at: {}))
    (polled,) = [one for one in watcher.collectors if isinstance(one.collector, Findings)]
    findings, spent = polled.collector, []
    assert isinstance(findings, Findings)
    with crowd(run_dir, VICTIM, 1, 1, 4, "victim"), crowd(run_dir, *CROWDS[kind]):
        for _ in range(SCRAPES):
            time.sleep(1)
            watcher.poll()
            assert polled._is_idle.wait(LONGEST)
            spent.append(cpu_seconds(polled))
            assert str(VICTIM) in {verdict.run[1] for verdict in findings.judged.verdicts}
    if kind == "control":
        assert not findings.judged.not_judged
    half = len(spent) // 2
    assert (spent[-1] - spent[half]) / (len(spent) - 1 - half) <= CORES
