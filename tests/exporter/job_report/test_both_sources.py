"""The same report from the exporter's journal and from a Prometheus that scraped it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.core import Metric
from testing import servers
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import lagging

from rankscope.cli.explaining.explanation import Explanation, explain
from rankscope.cli.explaining.prometheus import Prometheus
from rankscope.cli.explaining.runs import find_runs
from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.exposition.metric import WrittenFamily
from rankscope_exporter.job_report import queries, saved
from rankscope_exporter.job_report.job import Job
from rankscope_exporter.ranks import diagnosis_service, look
from rankscope_exporter.ranks.rank import Rank, Scan

AGO = 3000.0
"""The age of the run's start: the runs of this file take less time."""
INTERVAL = 15
LABELS = 'run="r",owner="{owner}",rank="{rank}"'
STUCK = 90
"""Seconds of a hang that is found before they are over."""


class ScrapedJob(JudgedJob):
    """A job whose exporter a Prometheus scrapes at each interval, `instance` being its address."""

    def __init__(self, run_dir: Path, state_dir: Path, booted: float) -> None:
        super().__init__(run_dir, state_dir=state_dir)
        self.booted, self.at, self.instance = booted, 0.0, "a:1"
        self.ended = self._scraped = 0.0
        self.lines: list[str] = []

    def start_exporter(self) -> None:
        super().start_exporter()
        poll = self.findings.poll

        def scraped(scan: Scan) -> list[Metric]:
            families = poll(scan)
            if self.at - self._scraped >= INTERVAL:
                self._scrape(families, scan.ranks)
            return families

        self.findings.poll = scraped  # type: ignore[method-assign]

    def poll(self, at: float, ended: Iterable[int] = ()) -> None:
        self.at = at
        super().poll(at, ended)

    def _scrape(self, families: Iterable[Metric], ranks: Iterable[Rank]) -> None:
        self._scraped = self.at
        lines = [line for one in families if isinstance(one, WrittenFamily) for line in one.text.decode().splitlines()]
        lines += [line for rank in ranks for line in self._of_rank(rank)]
        instance = f'{{instance="{self.instance}",'
        self.lines += [f"{line.replace('{', instance, 1)} {self.at + self.booted:.3f}\n" for line in lines]

    def _of_rank(self, rank: Rank) -> Iterator[str]:
        labels = LABELS.format(owner=rank.key[2], rank=rank.key[1])
        started = rank.snapshot["started_monotonic"] + self.booted
        yield f'rankscope_rank_info{{{labels},node="node-a"}} 1'
        yield f"rankscope_rank_up{{{labels}}} {int(rank.snapshot.alive)}"
        yield f"rankscope_rank_start_timestamp_seconds{{{labels}}} {started}"
        yield f"rankscope_rank_last_progress_timestamp_seconds{{{labels}}} {rank.snapshot.last_progress + self.booted}"
        if not rank.snapshot.alive:
            yield f"rankscope_rank_exit_timestamp_seconds{{{labels}}} {self.ended + self.booted}"

    def finish(self) -> None:
        """End all ranks, and let some scrapes pass."""
        self.ended = self.now
        for second in range(2 * INTERVAL):
            self.poll(self.now + second, ended=range(4))


@pytest.fixture
def job(run_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ScrapedJob:
    job = ScrapedJob(run_dir, state_dir, time.time() - AGO - 1000.0)
    thresholds = change_thresholds(Thresholds(), {"stuck": 20.0, "stuck_floor": 10.0})
    job._settings = replace(job._settings, thresholds=thresholds)
    job.start_exporter()
    clock = SimpleNamespace(time=lambda: job.at + job.booted, monotonic=lambda: job.at, thread_time=lambda: 0.0)
    monkeypatch.setattr(look, "time", clock)
    monkeypatch.setattr(diagnosis_service, "time", clock)
    return job


@pytest.fixture
def connect_to(tmp_path: Path) -> Iterator[Callable[[ScrapedJob], queries.Connect]]:
    """Yield a function that starts a Prometheus with the job's scrapes and returns how to query it, by default now."""
    with ExitStack() as stopped:

        def connect(job: ScrapedJob) -> queries.Connect:
            (tmp_path / "series.txt").write_text("".join(job.lines) + "# EOF\n")
            backfill = [servers.program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
            subprocess.run([*backfill, tmp_path / "series.txt", tmp_path / "prometheus-data"], check=True)
            server = servers.prometheus(tmp_path, "{}")
            # A scrape marks vanished series as stale; the blocks have no such marks.
            server.arguments = [*server.arguments, f"--query.lookback-delta={INTERVAL + 1}s"]
            stopped.enter_context(server)
            now = job.at + job.booted
            return lambda at: Prometheus(server.url, now if at is None else at)

        yield connect


@pytest.fixture
def by_url(connect_to: Callable[[ScrapedJob], queries.Connect]) -> Callable[[ScrapedJob], Job]:
    """Return a function that returns the report from a Prometheus."""
    return lambda job: queries.job(connect_to(job), "r", None, None)


def seen(job: Job) -> list[tuple[str, str, str]]:
    return [(one.kind, one.severity, one.sentence) for one in job.findings]


def check_same(journal: Job, url: Job) -> None:
    """Compare the numbers and words of two reports."""
    error = (0.03 if journal.ended is None else 0.0001) * journal.gpu_seconds
    assert url.gpu_seconds == pytest.approx(journal.gpu_seconds, abs=error)
    for cause in {**journal.causes, **url.causes}:
        assert url.causes.get(cause, 0.0) == pytest.approx(journal.causes.get(cause, 0.0), abs=error), cause
    assert seen(url) == seen(journal)
    for one, other in zip(url.findings, journal.findings, strict=True):
        assert one.begin == pytest.approx(other.begin, abs=1.5)
        assert one.ratio == pytest.approx(other.ratio, abs=0.001)
        assert (one.end is None) == (other.end is None)
        if one.end and other.end:
            assert one.end == pytest.approx(other.end, abs=1.5)


def test_two_faults_of_a_run_are_the_same_in_both_reports(job: ScrapedJob, state_dir: Path, by_url) -> None:
    job.train(40)
    job.train(60, lagging("optimizer"))
    job.train(120)
    job.train(60, lagging("backward", laggard=1))
    job.train(100)
    job.finish()
    (journal,) = saved.jobs(state_dir)
    assert [one.kind for one in journal.findings] == ["straggler", "straggler"]
    check_same(journal, by_url(job))


def test_a_hang_that_ended_is_the_same_in_both_reports(job: ScrapedJob, state_dir: Path, by_url) -> None:
    job.train(100)
    job.wait(STUCK, HUNG)
    job.resume(STUCK)
    job.train(60)
    job.finish()
    (journal,) = saved.jobs(state_dir)
    (hang,) = journal.findings
    assert hang.end
    assert hang.end - hang.begin == pytest.approx(STUCK, rel=0.03)
    assert journal.causes["stall"] == pytest.approx(4 * STUCK, rel=0.03)
    check_same(journal, by_url(job))


def test_a_hang_that_lasts_is_the_same_in_both_reports(job: ScrapedJob, state_dir: Path, by_url) -> None:
    job.train(100)
    job.wait(STUCK, HUNG)
    job.diagnosis.close()
    (journal,) = saved.jobs(state_dir)
    (hang,) = journal.findings
    assert hang.end is None
    assert journal.gpu_seconds == pytest.approx(4 * (100 + STUCK), rel=0.03)
    check_same(journal, by_url(job))


def test_a_restarted_exporter_without_a_state_counts_no_time_twice(job: ScrapedJob, state_dir: Path, by_url) -> None:
    job.train(60, lagging("optimizer"))
    (state_dir / "state-0.jsonl").unlink()
    job.start_exporter()
    job.instance = "a:2"
    job.train(60)
    job.finish()
    assert by_url(job).gpu_seconds == pytest.approx(4 * 120, rel=0.03)


def explanation(prometheus: Prometheus) -> Explanation:
    """Return the explanation of the only run."""
    (run,) = find_runs(prometheus, ("r", None, None), is_now=True)
    return explain(prometheus, run)


def test_explain_shows_what_the_exporter_has_found(job: ScrapedJob, connect_to) -> None:
    job.train(60, lagging("optimizer"))
    found = explanation(connect_to(job)(None))
    (finding,) = found.findings
    assert [finding.labels[name] for name in ("kind", "cause", "severity")] == ["straggler", "optimizer", "warning"]
    assert finding.labels["rank"] == found.largest_lag[0]
    assert (found.ranks, found.nodes, found.is_judged, found.ended) == (4, 1, True, None)
    assert sum(found.lost.values()) == pytest.approx(1.0)
    assert found.gpu_hours["straggler"] > 0.0


def test_explain_shows_only_the_standstill_of_a_run_that_hangs(job: ScrapedJob, connect_to) -> None:
    job.train(100)
    job.wait(STUCK, HUNG)
    found = explanation(connect_to(job)(None))
    assert [one.labels["kind"] for one in found.findings] == ["hang"]
    assert found.lost == {"stall": pytest.approx(1.0)}


def test_explain_shows_no_finding_that_has_ended(job: ScrapedJob, connect_to) -> None:
    job.train(60, lagging("optimizer"))
    job.train(60)
    found = explanation(connect_to(job)(None))
    assert (found.findings, found.is_judged) == ([], True)
