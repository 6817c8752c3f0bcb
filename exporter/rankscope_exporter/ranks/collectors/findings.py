"""The open findings of this machine's runs: what they lose their time to, and which rank causes it."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.judged import LIMITS, Judged, Judges
from rankscope_exporter.diagnosis.parts import Key
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.flags import flag
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.account import add_seconds
from rankscope_exporter.ranks.accounts import Accounts
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.look import Look, PollHistory
from rankscope_exporter.ranks.owner_files import OwnerFiles
from rankscope_exporter.ranks.principals import principal_of
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.readings import reading
from rankscope_exporter.ranks.state_file import StateFiles

SAVE_INTERVAL, MIN_SAVE_INTERVAL = 60.0, 10.0
"""Seconds between two saved states, and the fewest seconds between them if the findings have changed."""
LOG_INTERVAL = 60.0
logger = logging.getLogger(__name__)

RUN_LABELS = ("run", "owner")
FINDING_LABELS = ("run", "owner", "kind", "cause", "severity", "rank", "group", "node", "gpu", "uuid", "port")

JUDGED = Declaration(
    "gauge",
    "rankscope_run_judged_info",
    "Runs that this exporter diagnoses: all their ranks are on this machine, and their GPUs are read. `by` is the "
    "node. Absent in the first steps after the exporter's start. Prometheus' rules diagnose the other runs.",
    (*RUN_LABELS, "by"),
)
FINDING = Declaration(
    "gauge",
    "rankscope_finding_ratio",
    "Current loss of a run as a ratio of its GPU time (for a straggler, of the step; 1 if the run makes no progress). "
    "`cause` and place are fixed when it begins; `severity` rises at most once. A fault with another cause is another "
    "finding.",
    FINDING_LABELS,
)
SINCE = Declaration(
    "gauge", "rankscope_finding_since_timestamp_seconds", "Start of the finding, in unix time.", FINDING_LABELS
)
EVIDENCE = Declaration(
    "gauge",
    "rankscope_finding_evidence",
    "Evidence of a finding: at most four numbers in base units, by `name`.",
    (*FINDING_LABELS, "name"),
)
PEAK = Declaration(
    "gauge",
    "rankscope_finding_peak_ratio",
    "Largest rankscope_finding_ratio since the finding began. For ten minutes after its end it is still shown.",
    FINDING_LABELS,
)
MEAN = Declaration(
    "gauge",
    "rankscope_finding_mean_ratio",
    "Mean rankscope_finding_ratio since the finding began. For ten minutes after its end it is still shown.",
    FINDING_LABELS,
)
END = Declaration(
    "gauge",
    "rankscope_finding_end_timestamp_seconds",
    "End of a finding that is no longer open, in unix time, for ten minutes after it.",
    FINDING_LABELS,
)
LOST = Declaration(
    "gauge",
    "rankscope_run_lost_ratio",
    "Ratio of the run's GPU time by cause; the ratios sum to 1, and `none` is useful work.",
    (*RUN_LABELS, "cause"),
)
LOST_SECONDS = Declaration(
    "counter",
    "rankscope_run_lost_gpu_seconds_total",
    "GPU time that the run has lost, by cause.",
    (*RUN_LABELS, "cause"),
)
SPENT = Declaration(
    "gauge",
    "rankscope_run_gpu_seconds",
    "GPU time of the run's ranks on this node since their start, by cause. The causes sum to the whole time; `none` is "
    "useful work. For ten minutes after the run's end it is still shown. `rankscope report --url` reads the last "
    "value; use rankscope_run_lost_gpu_seconds_total for rates.",
    (*RUN_LABELS, "cause", "node"),
)
LAG = Declaration(
    "gauge",
    "rankscope_rank_lag_ratio",
    "Time that the other ranks of the group would save if the rank were like them, as a ratio of the step; negative "
    "for a rank that waits longer than they do.",
    ("run", "rank", "owner"),
)
NOT_JUDGED = Declaration(
    "gauge",
    "rankscope_exporter_runs_not_judged",
    "Living runs that are not diagnosed because of limits: `too_many_runs` (more than 64, or 16 with 64 ranks of one "
    "owner), `too_much_cpu_time` (their diagnosis takes more than their owner's share of 0.1 cores). Prometheus' "
    "rules diagnose them.",
    ("owner", "reason"),
)
LIMIT_METRICS = (NOT_JUDGED,)
METRICS = (JUDGED, FINDING, SINCE, EVIDENCE, PEAK, MEAN, END, LOST, LOST_SECONDS, SPENT, LAG)

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
    """The settings of the collector."""

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


class Findings:
    """The collector that judges the runs of each scan. It reads the results of the collectors before it."""

    name = "findings"
    help = "what training runs lose their time to, which rank causes it, and why"
    metrics = METRICS

    def __init__(
        self,
        alignment: AlignedSteps,
        processes: RankProcesses,
        network: Network,
        gpus: Callable[[float], Mapping[str, RankGpu]],
        settings: FindingFlags | None = None,
    ) -> None:
        """Create the collector. `gpus` returns the state of the machine's GPUs at a time, by UUID."""
        settings = settings or FindingFlags()
        self._alignment = alignment
        self._processes = processes
        self._network = network
        self._gpus = gpus
        self._judges = Judges(settings.thresholds, principal_of, time.thread_time)
        self._limited: Mapping[tuple[str, str], int] = {}
        """The number of living runs that are not judged because of limits, by owner and reason."""
        self._logged: tuple[float, Collection[tuple[str, str]]] = -math.inf, ()
        self._lost: dict[Run, dict[str, float]] = {}
        files = OwnerFiles(settings.state_dir) if settings.state_dir else None
        self._state_files = StateFiles(files)
        self._accounts = Accounts(files)
        self._lost_before: dict[Run, dict[str, float]] = {}
        """Restored counters of runs that have not been seen since the exporter's start."""
        self._found: set[tuple[Run, Key]] = set()
        self._saved_at = -math.inf
        for state in self._state_files.load():
            self._restore(state)
        self.judged = Judged((), {})
        """The result of the last poll."""
        self._history = PollHistory()
        self.look: Look | None = None
        """The last poll, for reports."""

    def poll(self, scan: Scan) -> list[Metric]:
        """Judge every run."""
        at = max((rank.snapshot.read_monotonic for rank in scan.ranks), default=time.monotonic())
        gpus = self._gpus(at)
        readings = self._readings(scan, gpus)
        self.judged = self._judges.update(at, readings, gpus)
        self.look = self._history.next(at, scan, readings, self.judged, gpus)
        self._count_limited(at, readings)
        self._count_lost()
        self._accounts.update(self.look, self._processes.resident())
        found = {(verdict.run, one.candidate.key) for verdict in self.judged.verdicts for one in verdict.findings}
        if at - self._saved_at >= (SAVE_INTERVAL if found == self._found else MIN_SAVE_INTERVAL):
            self._save(at, is_last=False)
            self._found = found
        limited = NOT_JUDGED.family(self._limited)
        return [*(declared.family(values) for declared, values in self._values(time.time()).items()), limited]

    def _count_limited(self, at: float, readings: Mapping[Run, Iterable[RankReading]]) -> None:
        """Count the living runs that limits exclude. If these are of others than before, log that once per minute."""
        reasons = {run: reason for run, reason in self.judged.not_judged.items() if reason in LIMITS}
        living = [run for run in reasons if any(one.ended is None for one in readings[run])]
        self._limited = Counter((run[1], reasons[run]) for run in living)
        logged_at, logged = self._logged
        if at - logged_at >= LOG_INTERVAL and self._limited.keys() - logged:
            (owner, reason), runs = max(self._limited.items(), key=lambda item: item[1])
            logger.warning(
                "runs are not diagnosed because of limits owners=%d most_of=%s runs=%d reason=%s",
                len({owner for owner, _ in self._limited}), owner, runs, reason,
            )  # fmt: skip
            self._logged = at, self._limited.keys()
        elif not self._limited:
            self._logged = logged_at, ()

    def _count_lost(self) -> None:
        known = {run[:2] for run in self._judges.judges}
        self._lost = {run: seconds for run, seconds in self._lost.items() if run in known}
        for verdict in self.judged.verdicts:
            run = verdict.run[:2]
            seconds = self._lost.get(run)
            if seconds is None:
                before = self._lost_before.pop(run, {})
                seconds = self._lost[run] = {**dict.fromkeys(CAUSES, 0.0), **before}
            add_seconds(seconds, {cause: lost for cause, lost in verdict.new_gpu_seconds.items() if cause != "none"})

    def close(self) -> None:
        """Save the full state, so that the counters of lost time continue after a restart."""
        if math.isfinite(self._saved_at):
            self._save(time.monotonic(), is_last=True)

    def _save(self, at: float, *, is_last: bool) -> None:
        """Save the state. Save counters only at the end: Prometheus must not see them decrease after a restart."""
        self._saved_at = at
        lost = [[*run, seconds] for run, seconds in self._lost.items()] if is_last else []
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

    def _readings(self, scan: Scan, gpus: Mapping[str, RankGpu]) -> Mapping[Run, list[RankReading]]:
        aligned, processes = self._alignment.alignments(), self._processes.processes()
        found: dict[Run, list[RankReading]] = defaultdict(list)
        uuids: dict[Run, dict[int, str]] = defaultdict(dict)
        for rank in scan.ranks:
            uuids[rank.run][rank.snapshot.lock_pid] = rank.uuid
        for rank in scan.ranks:
            of_run = uuids[rank.run]
            one = reading(rank, aligned.get(rank.key), processes.get(rank.key), gpus.get(rank.uuid), of_run)
            found[rank.run].append(replace(one, port_fault=self._network.fault))
        return found

    def _values(self, unix: float) -> Mapping[Declaration, dict[tuple[str, ...], float]]:
        values: dict[Declaration, dict[tuple[str, ...], float]] = {declared: {} for declared in METRICS}
        # Trainings with one name have series together: the mean of their ratios, and the sum of their seconds.
        trainings = Counter(verdict.run[:2] for verdict in self.judged.verdicts if verdict.lost)
        for verdict in self.judged.verdicts:
            run = verdict.run[:2]
            if verdict.is_ready:
                values[JUDGED][(*run, _node(verdict))] = 1.0
            for cause, ratio in verdict.lost.items():
                before = values[LOST].get((*run, cause), 0.0)
                values[LOST][(*run, cause)] = before + ratio / trainings[run]
            values[LOST_SECONDS].update({(*run, cause): lost for cause, lost in self._lost[run].items()})
            values[LAG].update({(run[0], str(rank), run[1]): lag for rank, lag in _lags(verdict)})
            for finding in verdict.findings:
                labels = _labels(verdict.run, finding)
                values[FINDING][labels] = finding.candidate.ratio
                values[SINCE][labels] = unix - (verdict.at - finding.since)
                values[EVIDENCE].update({(*labels, name): n for name, n in finding.candidate.evidence.items()})
        self._add_accounts(values)
        return values

    def _add_accounts(self, values: Mapping[Declaration, dict[tuple[str, ...], float]]) -> None:
        judged = {verdict.run for verdict in self.judged.verdicts}
        for account, seconds in self._accounts.gpu_seconds():
            run = account.run, account.owner
            # After a restart without a saved state the time is divided again: a cause that it no longer has is 0.
            causes = {**dict.fromkeys(CAUSES if run in judged else (), 0.0), **seconds}
            values[SPENT].update({(*run, cause, account.node): spent for cause, spent in causes.items()})
        for entry in self._accounts.findings():
            labels = tuple("" if entry[name] is None else str(entry[name]) for name in FINDING_LABELS)
            values[PEAK][labels], values[MEAN][labels] = entry["ratio"], entry["mean"]
            values[END].pop(labels, None)
            if "end" in entry:
                values[END][labels] = entry["end"]


def _node(verdict: Verdict) -> str:
    facts = verdict.facts
    if facts and facts.ranks:
        return facts.ranks[0].now.node
    return facts.ended[0].node if facts and facts.ended else ""


def _lags(verdict: Verdict) -> Iterator[tuple[int, float]]:
    for one in verdict.facts.ranks if verdict.facts else ():
        if one.lag is not None:
            yield one.rank, one.lag


def _labels(run: Run, finding: Finding) -> tuple[str, ...]:
    candidate, place = finding.candidate, finding.candidate.place
    rank = "".join(run[2:]) if place.rank is None else str(place.rank)
    what = candidate.kind, candidate.cause, finding.severity
    return (*run[:2], *what, rank, *place[1:])
