"""The diagnosis of this node's runs: the judges, the runs' accounts and the saved state, which nothing else owns.

The thread of the collector `findings` updates it once a second. The page, the API and reports read its last result.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.detectors import key_of
from rankscope_exporter.diagnosis.judged import LIMITS, Judges
from rankscope_exporter.diagnosis.parts import Key
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.flags import flag
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ledger.account import Account, add_seconds
from rankscope_exporter.ledger.accounts import Accounts
from rankscope_exporter.ledger.owner_files import OwnerFiles
from rankscope_exporter.ledger.state_file import StateFiles
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.look import Look, PollHistory
from rankscope_exporter.ranks.principals import principal_of
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.readings import reading

SAVE_INTERVAL, MIN_SAVE_INTERVAL = 60.0, 10.0
"""Seconds between two saved states, and the fewest seconds between them if the findings have changed."""
LOG_INTERVAL = 60.0
CLOSE_TIMEOUT = 5.0
"""Seconds that the end of the exporter waits for an update."""
NOT_LOST = ("none", "unknown")
CAUSES = (
    "transfer",
    "bubble",
    "stage_imbalance",
    "straggler",
    "data",
    "data_cpu",
    "data_io",
    "copies",
    "launch",
    "device_read",
    "device_wait",
    "throttling",
    "checkpoint",
    "evaluation",
    "startup",
    "stall",
    "idle",
    "other",
)
"""Causes that every run has from its start, so that an increase from 0 is seen as one."""

logger = logging.getLogger(__name__)


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
        help="existing directory for the state: baselines of runs, which a restart keeps, and their history for "
        "`rankscope report` (default: nothing is saved)",
    )


class Diagnosis(NamedTuple):
    """The result of one update."""

    look: Look
    lost: Mapping[Run, Mapping[str, float]]
    """Counters of the lost GPU seconds by cause, of each run's name and owner."""
    limited: Mapping[tuple[str, str], int]
    """The number of living runs that are not judged because of limits, by owner and reason."""
    spent: Sequence[tuple[Account, Mapping[str, float]]]
    """Each run's account, and its GPU seconds by cause."""
    findings: Sequence[Mapping[str, Any]]
    """The open findings, and those that have ended in the last minutes, with their `end`."""


class DiagnosisService:
    """Judges the runs of each scan from the results of the other rank collectors."""

    def __init__(
        self,
        alignment: AlignedSteps,
        processes: RankProcesses,
        network: Network,
        gpus: Callable[[float], Mapping[str, RankGpu]],
        settings: FindingFlags | None = None,
    ) -> None:
        """Restore the saved state. `gpus` returns the state of the machine's GPUs at a time, by UUID."""
        settings = settings or FindingFlags()
        self._alignment = alignment
        self._processes = processes
        self._network = network
        self._gpus = gpus
        self._judges = Judges(settings.thresholds, principal_of, time.thread_time)
        self._logged: tuple[float, Collection[tuple[str, str]]] = -math.inf, ()
        self._lost: dict[Run, dict[str, float]] = {}
        files = OwnerFiles(settings.state_dir) if settings.state_dir else None
        self._state_files = StateFiles(files)
        self._accounts = Accounts(files)
        self._lost_before: dict[Run, dict[str, float]] = {}
        """Restored counters of runs that have not been seen since the exporter's start."""
        self._saved_findings: set[tuple[Run, Key]] = set()
        self._saved_at = -math.inf
        for state in self._state_files.load():
            self._restore(state)
        self._history = PollHistory()
        self._lock = Lock()
        """Held by an update and by `close`, which different threads call."""
        self.look: Look | None = None
        """The last update, for reports. Any thread may read it."""

    def update(self, scan: Scan) -> Diagnosis:
        """Judge every run."""
        with self._lock:
            return self._update(scan)

    def close(self) -> None:
        """Save the full state, so that the counters of lost time continue after a restart."""
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT):
            logger.warning("the diagnosis takes too long to end; its state is not saved")
            return
        try:
            if math.isfinite(self._saved_at):
                self._save(time.monotonic(), is_last=True)
        finally:
            self._lock.release()

    def _update(self, scan: Scan) -> Diagnosis:
        at = max((rank.snapshot.read_monotonic for rank in scan.ranks), default=time.monotonic())
        gpus = self._gpus(at)
        readings = self._readings(scan, gpus)
        judged = self._judges.update(at, readings, gpus)
        look = self.look = self._history.next(at, scan, readings, judged, gpus)
        limited = self._count_limited(look)
        self._count_lost(look)
        self._accounts.update(look, self._resident(scan))
        findings = {(verdict.run, key_of(one.candidate)) for verdict in judged.verdicts for one in verdict.findings}
        if at - self._saved_at >= (SAVE_INTERVAL if findings == self._saved_findings else MIN_SAVE_INTERVAL):
            self._save(at, is_last=False)
            self._saved_findings = findings
        return Diagnosis(look, self._lost, limited, [*self._accounts.gpu_seconds()], [*self._accounts.findings()])

    def _count_limited(self, look: Look) -> Mapping[tuple[str, str], int]:
        """Count the living runs that limits exclude. If these are of others than before, log that once per minute."""
        reasons = {run: reason for run, reason in look.judged.not_judged.items() if reason in LIMITS}
        living = [run for run in reasons if any(one.ended is None for one in look.readings[run])]
        limited = Counter((run[1], reasons[run]) for run in living)
        logged_at, logged = self._logged
        if look.at - logged_at >= LOG_INTERVAL and limited.keys() - logged:
            ((owner, reason), runs), *_ = limited.most_common(1)
            logger.warning(
                "runs are not diagnosed because of limits owners=%d most_of=%s runs=%d reason=%s",
                len({owner for owner, _ in limited}), owner, runs, reason,
            )  # fmt: skip
            self._logged = look.at, limited.keys()
        elif not limited:
            self._logged = logged_at, ()
        return limited

    def _count_lost(self, look: Look) -> None:
        known = {run[:2] for run in self._judges.judges}
        self._lost = {run: seconds for run, seconds in self._lost.items() if run in known}
        for verdict in look.judged.verdicts:
            run = verdict.run[:2]
            seconds = self._lost.get(run)
            if seconds is None:
                before = self._lost_before.pop(run, {})
                seconds = self._lost[run] = {**dict.fromkeys(CAUSES, 0.0), **before}
            lost = {cause: one for cause, one in verdict.new_gpu_seconds.items() if cause not in NOT_LOST}
            add_seconds(seconds, lost)

    def _resident(self, scan: Scan) -> Mapping[int, float]:
        """Return the resident bytes of each process, by pid."""
        found = [(rank.snapshot.lock_pid, self._processes.found.get(rank.key)) for rank in scan.ranks]
        return {pid: process.usage.resident for pid, process in found if process and process.usage}

    def _readings(self, scan: Scan, gpus: Mapping[str, RankGpu]) -> Mapping[Run, list[RankReading]]:
        aligned, processes, fault = self._alignment.counters, self._processes.found, self._network.fault
        found: dict[Run, list[RankReading]] = defaultdict(list)
        uuids: dict[Run, dict[int, str]] = defaultdict(dict)
        for rank in scan.ranks:
            uuids[rank.run][rank.snapshot.lock_pid] = rank.uuid
        for rank in scan.ranks:
            of_run = uuids[rank.run]
            one = reading(rank, aligned.get(rank.key), processes.get(rank.key), gpus.get(rank.uuid), of_run)
            found[rank.run].append(replace(one, port_fault=fault))
        return found

    def _save(self, at: float, *, is_last: bool) -> None:
        """Save the state. Save counters only at the end: Prometheus must not see them decrease after a restart."""
        self._saved_at = at
        lost: Iterable[Sequence[Any]] = [[*run, seconds] for run, seconds in self._lost.items()] if is_last else []
        runs = self._judges.state(at, is_last=is_last)
        state = {"account": self._accounts.state(), "lost": lost, "judge": runs}
        self._state_files.save(time.time(), state, is_last=is_last)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of one run."""
        try:
            run, lost = tuple(map(str, state["run"])), state.get("lost", {})
            if "judge" in state:
                self._judges.restore(run, state["judge"], max(time.time() - float(state["at"]), 0.0))
            self._lost_before[run] = {str(cause): float(seconds) for cause, seconds in lost.items()}
            if "account" in state:
                self._accounts.restore(state["account"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            logger.warning("ignoring the saved state of a run error=%r", error)
