"""A job whose clock a test sets, read and judged once a second as in an exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.findings import Findings
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.diagnosis_service import DiagnosisService, FindingFlags
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Rank, Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.report.runs import Reporter, RunReport, report_of_look
from testing.simulated_job import Job, Plan, even

HUNG = {0: "collective_wait", 1: "collective_wait", 2: "data_wait", 3: "collective_wait"}
"""The phases of four ranks, of which rank 2 is stuck."""


class JudgedJob:
    """Ranks in synchronous training on this node, and the collectors that judge them."""

    def __init__(
        self,
        directory: Path,
        ranks: int = 4,
        gpus: Callable[[float], Mapping[str, RankGpu]] = lambda _at: {},
        state_dir: Path | None = None,
        job: Job | None = None,
        **labels: Any,
    ) -> None:
        labels = {"world_size": str(ranks), "group": f"0-{ranks - 1}", "node": "node-a", **labels}
        self.job = job or Job(directory, ranks, **labels)
        self._directory = RunDirectory([directory])
        self._gpus, self._settings = gpus, FindingFlags(state_dir=state_dir)
        self.start_exporter()

    def start_exporter(self) -> None:
        """Start with new collectors, as after a restart of the exporter."""
        self._alignment, self._processes = AlignedSteps(), RankProcesses()
        network = Network(Path("/nonexistent"))
        self.diagnosis = DiagnosisService(self._alignment, self._processes, network, self._gpus, self._settings)
        self.findings = Findings(self.diagnosis)

    @property
    def now(self) -> float:
        """The time of the rank that is furthest."""
        return max(rank.now for rank in self.job.ranks)

    def train(self, seconds: int, plan: Plan = even) -> RunReport:
        """Train all ranks and poll after each second. Return the run's last report."""
        for until in [self.now + second for second in range(1, seconds + 1)]:
            while self.now < until:
                self.job.run(1, plan)
            self.poll(self.now)
        return self.report()

    def trained(self, seconds: int, plan: Plan = even) -> JudgedJob:
        """Train and return this job."""
        self.train(seconds, plan)
        return self

    def wait(self, seconds: int, phases: Mapping[int, str]) -> RunReport:
        """Let seconds pass without progress, with the ranks in these phases. Return the report."""
        for rank, phase in phases.items():
            self.job.ranks[rank].enter(phase)
        since = self.now
        for passed in range(1, seconds + 1):
            self.poll(since + passed)
        return self.report()

    def resume(self, seconds: float) -> None:
        """Let the ranks go on after so many seconds without progress."""
        for rank in self.job.ranks:
            rank.now += seconds

    def finish(self) -> None:
        """End all ranks."""
        self.poll(self.now, ended=range(len(self.job.ranks)))

    def poll(self, at: float, ended: Iterable[int] = ()) -> None:
        """Read and judge everything at that time. Ranks in `ended` were killed then."""
        found = self._directory.scan(with_steps=True)
        scan = Scan(
            [_as_read(rank, at, is_alive=int(rank.key[1]) not in {*ended}) for rank in found.ranks], found.skipped
        )
        for collector in (self._alignment, self._processes, self.findings):
            collector.poll(scan)

    @property
    def look(self) -> Look:
        """The last poll."""
        assert self.diagnosis.look is not None
        return self.diagnosis.look

    def reporter(self) -> Reporter:
        """Return a reporter of the last poll, at the time when it is new."""
        return Reporter(lambda: self.look.scan, lambda: self.look, monotonic=lambda: self.look.at)

    def report(self) -> RunReport:
        """Return the report of the only run."""
        (run,) = report_of_look(self.look).runs
        return run


def _as_read(rank: Rank, at: float, *, is_alive: bool) -> Rank:
    """Return the rank as read at that time. The kernel does not show a process its own locks."""
    snapshot = replace(rank.snapshot, alive=is_alive, read_monotonic=at, unix_offset=None)
    return replace(rank, snapshot=snapshot, exit_unix=None if is_alive else rank.exit_unix)
