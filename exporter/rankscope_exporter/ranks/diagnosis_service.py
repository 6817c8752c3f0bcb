"""The diagnosis of this node's runs: the judges, the runs' accounts and the saved state, which nothing else owns.

The thread of the collector `findings` updates it once a second. The page, the API and reports read its last result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rankscope_exporter.diagnosis.judged import Judges
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.flags import flag
from rankscope_exporter.gpu.rank_gpus import GpuFaults, RankGpu
from rankscope_exporter.ledger.accounts import Accounts
from rankscope_exporter.ledger.node_history import Poll
from rankscope_exporter.ledger.owner_files import OwnerFiles
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.judged_runs import Diagnosis, JudgedRuns
from rankscope_exporter.ranks.look import Look, PollHistory
from rankscope_exporter.ranks.oom_kills import OomKills
from rankscope_exporter.ranks.principals import principal_of
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.readings import reading


def _thresholds(text: str) -> Thresholds:
    """Return the thresholds of a JSON file. Raise ArgumentTypeError."""
    try:
        return read_document(Path(text), "JSON", json.loads, lambda values: change_thresholds(Thresholds(), values))
    except DocumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _directory(text: str) -> Path:
    """Return an existing directory that may be read and written. Raise ArgumentTypeError."""
    path = Path(text)
    try:
        next(path.iterdir(), None)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable")
    return path


@dataclass(frozen=True, kw_only=True)
class FindingFlags:
    """The settings of the diagnosis."""

    thresholds: Thresholds = flag(
        "--collector.findings.thresholds",
        type=_thresholds,
        default=Thresholds(),
        metavar="FILE",
        help="JSON object of diagnosis thresholds to change, by name (docs/diagnosis.md)",
    )
    state_dir: Path | None = flag(
        "--state-dir",
        type=_directory,
        metavar="DIR",
        help="existing directory for the state: baselines of runs, which a restart keeps, their history for "
        "`rankscope report`, and that of the GPUs for `rankscope history` (default: nothing is saved)",
    )


class DiagnosisService(JudgedRuns):
    """Judges the runs of each scan from the results of the other rank collectors."""

    def __init__(
        self,
        alignment: AlignedSteps,
        processes: RankProcesses,
        network: Network,
        gpus: Callable[[float], Mapping[str, RankGpu]],
        settings: FindingFlags | None = None,
        *,
        faults: Callable[[], Mapping[str, GpuFaults]] = dict,
        node: str = "",
    ) -> None:
        """Restore the saved state. `gpus` returns the state of the machine's GPUs at a time, by UUID.

        `faults` returns what the driver reports of their hardware, and `node` is this machine's name.
        """
        settings = settings or FindingFlags()
        self._alignment = alignment
        self._processes = processes
        self._network = network
        self._gpus, self._faults = gpus, faults
        files = OwnerFiles(settings.state_dir) if settings.state_dir else None
        super().__init__(Judges(settings.thresholds, principal_of, time.thread_time), files, node)
        self._accounts = Accounts(files)
        self._history = PollHistory()
        self._oom_kills = OomKills()
        self._captured = SimpleQueue[tuple[Run, str]]()
        self.listeners: Sequence[Callable[[Look], None]] = ()
        """Called with each update, on its thread."""
        self.load()

    def add_capture(self, run: Run, path: str) -> None:
        """Record the path of a capture for reports. Any thread may call it."""
        self._captured.put((run, path))

    def update(self, scan: Scan) -> Diagnosis:
        """Judge every run."""
        with self._lock:
            return self._update(scan)

    def _update(self, scan: Scan) -> Diagnosis:
        at = max((rank.snapshot.read_monotonic for rank in scan.ranks), default=time.monotonic())
        gpus = self._gpus(at)
        readings = self._readings(scan, gpus, self._oom_kills.last(at))
        judged = self._judges.update(at, readings, gpus)
        look = self.look = self._history.next(at, scan, readings, judged, gpus)
        limited = self._count_limited(look)
        self._count_lost(look)
        self._accounts.update(look, self._resident(scan))
        while not self._captured.empty():
            self._accounts.add_capture(*self._captured.get(), look.unix)
        faults, port_fault = self._faults(), self._network.fault
        poll = Poll(look, self._accounts.open_findings(), gpus.keys() | faults.keys(), faults, port_fault)
        self._node_history.update(poll)
        self._save_if_due(at)
        for listener in self.listeners:
            listener(look)
        spent, findings = [*self._accounts.gpu_seconds()], [*self._accounts.findings()]
        return Diagnosis(look, self._lost, limited, spent, findings, self._node_history.culprits)

    def _resident(self, scan: Scan) -> Mapping[int, float]:
        """Return the resident bytes of each process, by pid."""
        found = [(rank.snapshot.lock_pid, self._processes.found.get(rank.key)) for rank in scan.ranks]
        return {pid: process.usage.resident for pid, process in found if process and process.usage}

    def _readings(
        self, scan: Scan, gpus: Mapping[str, RankGpu], oom_killed_at: float | None
    ) -> Mapping[Run, list[RankReading]]:
        aligned, processes, fault = self._alignment.counters, self._processes.found, self._network.fault
        found: dict[Run, list[RankReading]] = defaultdict(list)
        uuids: dict[Run, dict[int, str]] = defaultdict(dict)
        for rank in scan.ranks:
            uuids[rank.run][rank.snapshot.lock_pid] = rank.uuid
        for rank in scan.ranks:
            of_run = uuids[rank.run]
            one = reading(rank, aligned.get(rank.key), processes.get(rank.key), gpus.get(rank.uuid), of_run)
            found[rank.run].append(replace(one, port_fault=fault, oom_killed_at=oom_killed_at))
        return found

    def _own_state(self) -> Mapping[str, Iterable[Sequence[Any]]]:
        return {"account": self._accounts.state()}

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        if "account" in state:
            self._accounts.restore(state["account"])
