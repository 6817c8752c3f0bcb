"""The common part of each diagnosis of runs: the judges, the counters of lost time, the log of limits, the saved state.

The exporter's diagnosis of its node and the analyzer's diagnosis of runs that span nodes are built on it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.detectors import key_of
from rankscope_exporter.diagnosis.judged import LIMITS, Judges
from rankscope_exporter.diagnosis.parts import Key
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.ledger.account import Account, add_seconds
from rankscope_exporter.ledger.node_history import Culprits, NodeHistory
from rankscope_exporter.ledger.owner_files import OwnerFiles
from rankscope_exporter.ledger.state_file import StateFiles
from rankscope_exporter.ranks.look import Look

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
    culprits: Culprits
    """The number of runs of the last week in which each GPU was the culprit."""


class JudgedRuns:
    """The judges of runs, with what they need over a restart. Only one thread at a time may update it."""

    def __init__(self, judges: Judges, files: OwnerFiles | None, node: str = "") -> None:
        """Set the judges, and the files of the state directory; None to save nothing. `load` restores the state.

        `node` is the name of the node if all runs are judged on one.
        """
        self._judges = judges
        self._node_history = NodeHistory(files, node)
        self._logged: tuple[float, Collection[tuple[str, str]]] = -math.inf, ()
        self._lost: dict[Run, dict[str, float]] = {}
        self._state_files = StateFiles(files)
        self._lost_before: dict[Run, dict[str, float]] = {}
        """Restored counters of runs that have not been seen since the start."""
        self._saved_findings: set[tuple[Run, Key]] = set()
        self._saved_at = -math.inf
        self._lock = Lock()
        """Held by an update and by `close`, which different threads call."""
        self.look: Look | None = None
        """The last update, for reports. Any thread may read it."""

    def load(self) -> None:
        """Restore the saved state."""
        for state in self._state_files.load():
            self._restore(state)

    def now(self) -> float:
        """Return the time of the readings' clock."""
        return time.monotonic()

    def close(self) -> None:
        """Save the full state, so that the counters of lost time continue after a restart."""
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT):
            logger.warning("the diagnosis takes too long to end; its state is not saved")
            return
        try:
            if math.isfinite(self._saved_at):
                self._save(self.now(), is_last=True)
                self._node_history.save()
        finally:
            self._lock.release()

    def _count_limited(self, look: Look) -> Mapping[tuple[str, str], int]:
        """Count the living runs that limits exclude. If these are of others than before, log that once per minute."""
        limited = Counter((run[1], reason) for run, reason in look.not_judged().items() if reason in LIMITS)
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

    def _save_if_due(self, at: float) -> None:
        verdicts = self.look.judged.verdicts if self.look else ()
        findings = {(verdict.run, key_of(one.candidate)) for verdict in verdicts for one in verdict.findings}
        if at - self._saved_at >= (SAVE_INTERVAL if findings == self._saved_findings else MIN_SAVE_INTERVAL):
            self._save(at, is_last=False)
            self._saved_findings = findings

    def _save(self, at: float, *, is_last: bool) -> None:
        """Save the state. Save counters only at the end: Prometheus must not see them decrease after a restart."""
        self._saved_at = at
        lost: Iterable[Sequence[Any]] = [[*run, seconds] for run, seconds in self._lost.items()] if is_last else []
        runs = self._judges.state(at, is_last=is_last)
        self._state_files.save(time.time(), {**self._own_state(), "lost": lost, "judge": runs}, is_last=is_last)

    def _own_state(self) -> Mapping[str, Iterable[Sequence[Any]]]:
        """Return what else is saved, by its kind: values after their runs."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of one run."""
        try:
            run, lost = tuple(map(str, state["run"])), state.get("lost", {})
            if "judge" in state:
                self._judges.restore(run, state["judge"], max(time.time() - float(state["at"]), 0.0))
            self._lost_before[run] = {str(cause): float(seconds) for cause, seconds in lost.items()}
            self._restore_own(state)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            logger.warning("ignoring the saved state of a run error=%r", error)

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        """Restore what `_own_state` returned of one run. Raise one of history.UNREADABLE if it is damaged."""
