"""The diagnosis of the runs that span nodes: each second is judged when all nodes with ranks have sent it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankscope_exporter.analyzer.merge import WAIT, Joined, Merge
from rankscope_exporter.diagnosis.detectors import hang
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.judged import Judged, Judges, Limits
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.ledger.accounts import Accounts
from rankscope_exporter.ledger.node_history import Poll
from rankscope_exporter.ledger.owner_files import ANALYZER_SCALE, OwnerFiles
from rankscope_exporter.node_facts.wire import Answer
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from rankscope_exporter.ranks.judged_runs import Diagnosis, JudgedRuns
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.recent import Moment

SECOND = 1.0
LATEST, LATEST_AFTER_STOP = 30.0, 90.0
"""Seconds by which the diagnosis may be late before seconds are left out: because it takes too long, and after a stop
of this process, for which exporters keep what they have read."""
SECONDS_AT_ONCE = 10
"""The most seconds that an update judges: answers wait for its end."""
HOLD_SECONDS = 60.0
"""How long the findings of a run stay that no node shows any longer, or of which nodes are missing."""
LIMITS = Limits(runs=64, ranks=4096, remembered_bytes=512 * 2**20, cpu_seconds=0.8)


class Analyzer(JudgedRuns):
    """Judges the runs of all nodes. `take` and `update` may be called by different threads."""

    def __init__(self, settings: FindingFlags | None = None, clock: Callable[[], float] | None = None) -> None:
        """Restore the saved state.

        By default, times are unix times that no change of the clock affects: a restart goes on with them.
        """
        settings = settings or FindingFlags()
        files = OwnerFiles(settings.state_dir, scale=ANALYZER_SCALE) if settings.state_dir else None
        super().__init__(Judges(settings.thresholds, str, time.thread_time, LIMITS), files)
        self._merge = Merge()
        began = time.time() - time.monotonic()
        self._clock = clock or (lambda: began + time.monotonic())
        self._judged_until = self._updated_at = self._resumed_at = -float("inf")
        self._missing_since: dict[Run, float] = {}
        self._interrupted: set[Run] = set()
        """The runs whose findings of losses have ended since then."""
        self._last: dict[Run, Verdict] = {}
        self._accounts = Accounts(files, absent_seconds=HOLD_SECONDS)
        self.missing: Mapping[Run, Sequence[str]] = {}
        """The runs of which ranks are missing, with the names of the nodes."""
        self._hanging: Mapping[str, Collection[Run]] = {}
        """The runs that hang, by the boot of a node with ranks of them, as that node names them."""
        self._empty = Scan((), Counter())
        self._judges.started = self.now()  # the first readings come seconds later
        self.load()

    def now(self) -> float:
        """Return the time by this process' clock."""
        return self._clock()

    def cursor(self, target: str) -> float | None:
        """Return what to ask a target for: all moments after this one, by its own clock."""
        with self._lock:
            node = self._merge.nodes.get(target)
            return node.cursor if node else None

    def has_ranks(self, target: str) -> bool:
        """Return whether a target has sent ranks of runs that span nodes."""
        with self._lock:
            node = self._merge.nodes.get(target)
            return node is not None and node.has_ranks

    def hanging(self, target: str) -> Collection[Run]:
        """Return the runs with ranks of a target that hang, as its node names them."""
        with self._lock:
            node = self._merge.nodes.get(target)
            return self._hanging.get(node.boot, ()) if node else ()

    def take(self, target: str, answer: Answer, sent: float, received: float, size: int = 0) -> None:
        """Add the answer of a target, of `size` bytes."""
        with self._lock:
            self._merge.take(target, answer, sent, received, size)

    def update(self, now: float | None = None) -> Diagnosis | None:
        """Judge each second that is known and not judged yet. Return the last result; None if there is no new one."""
        with self._lock:
            now = self.now() if now is None else now
            if now - self._updated_at > WAIT:  # this process was stopped, and has not asked
                self._resumed_at = now
            self._updated_at = now
            is_resumed = now - self._resumed_at < WAIT
            until = self._merge.known_until(now, self._judged_until, is_resumed=is_resumed)
            if self._judged_until < until - (LATEST_AFTER_STOP if is_resumed else LATEST):
                self._judged_until = until - SECOND
            seconds, found = int((until - self._judged_until) / SECOND), None
            if seconds > 0:
                self._judged_until = until - seconds * SECOND  # the last second ends with what is known
            for _ in range(min(seconds, SECONDS_AT_ONCE)):
                self._judged_until += SECOND
                found = self._judge(self._judged_until)
            return found

    def _judge(self, at: float) -> Diagnosis:
        joined = self._merge.join(at)
        self.missing = joined.missing
        self._interrupt(at, joined)
        judged_now = {run: ranks for run, ranks in joined.readings.items() if run not in joined.not_answering}
        judged = self._judges.update(at, judged_now, joined.known_gpus)
        verdicts = [_without_comparison(one) if one.run in joined.missing else one for one in judged.verdicts]
        self._last = {verdict.run: verdict for verdict in (*self._held(at, joined), *verdicts)}
        judged = Judged(tuple(self._last.values()), judged.not_judged)
        hanging = {run for run, verdict in self._last.items() if any(one.kind == hang.KIND for one in verdict.findings)}
        self._hanging = self._merge.names_by_boot(hanging)
        unix = time.time() - (self.now() - at)
        look = self.look = Look(at, unix, self._empty, joined.readings, judged, {}, {}, Moment(at, {}))
        limited = self._count_limited(look)
        self._count_lost(look)
        self._accounts.update(look, {})
        self._node_history.update(Poll(look, self._accounts.open_findings(), joined.known_gpus))
        self._save_if_due(self.now())
        spent, findings = [*self._accounts.gpu_seconds()], [*self._accounts.findings()]
        return Diagnosis(look, self._lost, limited, spent, findings, self._node_history.culprits)

    def _interrupt(self, at: float, joined: Joined) -> None:
        """End the findings about late ranks and transfer of runs that lack a node for a minute: they are unknown."""
        self._missing_since = {run: self._missing_since.get(run, at) for run in joined.missing}
        self._interrupted &= joined.missing.keys()
        for run, since in self._missing_since.items():
            judge = self._judges.judges.get(run)
            if judge and at - since >= HOLD_SECONDS and run not in self._interrupted:
                self._interrupted.add(run)
                judge.forget_losses()

    def _held(self, at: float, joined: Joined) -> Iterable[Verdict]:
        """Yield the last verdicts on runs of which no node answers, for a while."""
        for run in joined.not_answering:
            if at - self._missing_since.get(run, at) < HOLD_SECONDS and (verdict := self._last.get(run)):
                yield replace(verdict, new_gpu_seconds={})

    def _own_state(self) -> Mapping[str, Iterable[Sequence[Any]]]:
        return {
            "anchors": [[*run, anchors] for run, anchors in self._merge.boots().items()],
            "jobs": [[*run, known] for run, known in self._merge.jobs.state()],
            "account": self._accounts.state(),
        }

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        if "account" in state:
            self._accounts.restore(state["account"])
        self._merge.jobs.restore(tuple(map(str, state["run"])), state.get("jobs", ()))
        self._merge.restored_anchors.update(
            {str(boot): float(offset) for boot, offset in state.get("anchors", {}).items()}
        )


def _without_comparison(verdict: Verdict) -> Verdict:
    """Return the verdict on a run of which ranks are missing, without what is then unknown: who waits for whom."""
    facts = verdict.facts and replace(verdict.facts, ranks=tuple(replace(one, lag=None) for one in verdict.facts.ranks))
    spent = sum(verdict.new_gpu_seconds.values())
    return replace(verdict, facts=facts, lost={}, new_gpu_seconds={"unknown": spent} if spent else {})
