"""A run of the gauntlet: quiet, the fault, its notification, healing, and quiet again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testing.job.launch import JobError
from testing.stack import wait_for
from testing.webhook import Notification
from validation.gauntlet.arena import RUN, LoneArena
from validation.gauntlet.case import Case, Target
from validation.gauntlet.runbooks import ask
from validation.gauntlet.schedule import Run
from validation.gauntlet.score import Verdict, false_alarms, judge

from rankscope.cli.explaining.explanation import explain
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.cli.explaining.runs import find_runs

LISTEN_ON = 5.0  # seconds after the last expected notification, for false alarms
DECOY_FOR = 25.0  # seconds: more than twice the time of the slowest rule
RESOLVED_WITHIN = 45.0
Cases = Sequence[tuple[Case, Target]]


class Runner:
    """Runs lines of a schedule in one arena, with `longer` more seconds before the onset and after the notification."""

    def __init__(self, arena: LoneArena, longer: float = 0.0) -> None:
        self._arena, self._longer = arena, longer

    def run(self, run: Run) -> dict[str, Any]:
        """Return the line for the ledger. If training itself fails, try again in a new job; then raise JobError."""
        try:
            return self._run(run)
        except JobError:
            self._arena.job.terminate()
            self._arena.heal()
            self._arena.become_quiet()
            return self._run(run)

    def _run(self, run: Run) -> dict[str, Any]:
        first = len(self._arena.stack.webhook.notifications)
        cases = [(self._placed(case), target) for case, target in run.cases]
        began = time.time()
        time.sleep(max(run.wait, *(case.healthy_seconds for case, _ in cases)) + self._longer)
        healthy_step = self._arena.step_seconds()
        injected = time.time()
        for case, target in cases:
            case.inject(self._arena, target)
        onset = self._arena.onset
        verdicts = self._listen(cases, onset, first)
        explained = self._explained()
        runbook = self._runbook(cases, verdicts)
        step = self._arena.step_seconds()
        ended = time.time()
        errors = self._arena.stack.prometheus.rule_errors()
        healed = self._arena.heal()
        resolved = self._resolved(healed, first)
        is_quiet = self._arena.become_quiet()
        return {
            **run.line(),
            "injected": round(injected, 3),
            "onset": round(onset, 3),
            "ended": round(ended, 3),
            "verdicts": [verdict.line() for verdict in verdicts],
            "explained": explained,
            "runbook": runbook,
            "resolved": resolved is not None,
            "resolved_seconds": resolved,
            "false_alarms": false_alarms(cases, self._since(first)),
            "quiet_afterwards": is_quiet,
            "step_seconds": [healthy_step, step],
            "rule_errors": errors,
            "watched_seconds": round(time.time() - began, 1),
            "load": os.getloadavg()[0],
        }

    def _explained(self) -> dict[str, Any]:
        """Return the worst finding that `rankscope explain` shows now. It should match the notification."""
        prometheus = Prometheus(self._arena.stack.prometheus.url)
        try:
            found = explain(prometheus, find_runs(prometheus, (RUN, None, None), is_now=True)[0])
        except PrometheusError as error:
            return {"error": str(error)}
        return next(({**one.labels, "ratio": one.ratio} for one in found.findings), {})

    def _placed(self, case: Case) -> Case:
        """Return the case with the labels that its place has in the arena."""
        return replace(case, place=lambda target: self._arena.labels_of(case.place(target)))

    def _runbook(self, cases: Cases, verdicts: list[Verdict]) -> list[dict[str, Any]]:
        """Return the current answers to the queries in the runbooks of the notified alerts."""
        notified = [
            (verdict.labels["alertname"], case.place(target))
            for (case, target), verdict in zip(cases, verdicts, strict=False)
            if verdict.labels
        ]
        return ask(self._arena.stack.prometheus.url, RUN, notified)

    def _listen(self, cases: Cases, onset: float, first: int) -> list[Verdict]:
        """Wait for all expected notifications and a little longer, or for the time of a decoy. Return the verdicts."""

        def verdicts() -> list[Verdict]:
            faults = [fault for fault in cases if not fault[0].is_decoy]
            return [judge(case, target, onset, self._since(first)) for case, target in faults]

        if all(case.is_decoy for case, _ in cases):
            time.sleep(DECOY_FOR)
            return verdicts()
        until = onset + max(case.notified_within for case, _ in cases)
        if wait_for(lambda: all(verdict.fired for verdict in verdicts()), until - time.time()):
            time.sleep(LISTEN_ON + self._longer)
        return verdicts()

    def _resolved(self, healed: float, first: int) -> float | None:
        """Return the seconds from healing until every notified alert was resolved; None if it was not in time."""

        def is_over() -> bool:
            firing: dict[frozenset[tuple[str, str]], bool] = {}
            for notification in self._since(first):
                firing[frozenset(notification.labels.items())] = notification.is_firing
            return not any(firing.values())

        within = RESOLVED_WITHIN - (time.time() - healed)
        return round(time.time() - healed, 1) if wait_for(is_over, max(within, 1.0)) else None

    def _since(self, first: int) -> list[Notification]:
        return self._arena.stack.webhook.notifications[first:]
