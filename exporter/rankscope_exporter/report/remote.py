"""Reports of other machines: of an exporter's node, or of the runs that the analyzer diagnoses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from threading import Lock
from typing import TypeVar
from urllib.parse import urlencode

from pydantic import TypeAdapter

from rankscope.cli.explaining.fetching import Answer as HttpAnswer
from rankscope.cli.explaining.fetching import FetchError, within
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.cli.rank_stacks import RankStacks, StacksReport
from rankscope_exporter.report.gpus import GpuProblem, GpuReport, GpusReport
from rankscope_exporter.report.runs import ANALYZED, NodeReport, RunReport, ordered, places

ANSWERS_WITHIN = 10.0
STACKS_WITHIN = 30.0
"""The time of the exporter for a response: other clients' answers may be made first."""
LARGEST = 2**53
"""The largest count of a record."""
ASK_INTERVAL = 2.0
"""Seconds between two requests to the analyzer, while this node's report is read."""
READ_FOR, KNOWN_FOR = 30.0, 15.0
"""Seconds after a reading of this node's report for which the analyzer is asked, and for which its answer counts."""


@dataclass(frozen=True)
class RemoteReport:
    """The answer of an exporter or an analyzer. The last three are those of an analyzer."""

    at: float
    runs: Sequence[RunReport]
    gpu_problems: Sequence[GpuProblem] = ()
    targets: Mapping[str, int] = field(default_factory=dict)
    """The number of exporters that answer it (`up`) and that do not (`failing`)."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why exporters do not answer it, by URL: the first ones."""
    exporters: Sequence[str] = ()
    """The URLs of the exporters that it asks: the first ones."""


STACKS = TypeAdapter(StacksReport)
REPORT = TypeAdapter(RemoteReport)
GPUS = TypeAdapter(GpusReport)
ReportT = TypeVar("ReportT")
Fetch = Callable[[str, Mapping[str, str]], HttpAnswer]


class RemoteError(Exception):
    """The report cannot be read; the text says from where, and why."""


def fetch_report(server: Prometheus, seconds: float = ANSWERS_WITHIN) -> RemoteReport:
    """Return the report at `/api/v1/runs` of an exporter or an analyzer. Raise RemoteError."""
    return _validated(server, REPORT, _ask(server, "runs", seconds))


def fetch_gpus(server: Prometheus, seconds: float = ANSWERS_WITHIN) -> Sequence[GpuReport]:
    """Return the GPUs at `/api/v1/gpus` of an exporter; none from an analyzer. Raise RemoteError."""
    answer = _ask(server, "gpus", seconds, HTTPStatus.NOT_FOUND)
    return () if answer.status == HTTPStatus.NOT_FOUND else _validated(server, GPUS, answer).gpus


def fetch_stacks(server: Prometheus, run: str) -> Sequence[RankStacks]:
    """Return the ranks of a run at `/api/v1/stacks` of an exporter, none if it has none. Raise RemoteError."""
    page = f"stacks?{urlencode({'run': run})}"
    answer = _ask(server, page, STACKS_WITHIN, HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)
    if answer.status == HTTPStatus.FORBIDDEN:
        raise RemoteError("does not allow it: its exporter runs without --web.enable-stacks")
    if answer.status == HTTPStatus.NOT_FOUND:
        if b'"error"' in answer.body:
            return ()
        raise RemoteError("its exporter is too old for stacks")
    ranks = _validated(server, STACKS, answer).ranks
    if any(abs(number) > LARGEST for one in ranks for number in (one.rank, one.step, one.number, one.pid)):
        raise RemoteError("its answer has a number that no exporter sends")
    return ranks


def _ask(server: Prometheus, page: str, seconds: float, *allowed: HTTPStatus) -> HttpAnswer:
    try:
        answer = within(seconds, lambda: server.ask(page))
    except (PrometheusError, TimeoutError) as error:
        raise RemoteError(f"{server.url}: {error}" if isinstance(error, TimeoutError) else str(error)) from error
    if answer.status not in (HTTPStatus.OK, *allowed):
        raise RemoteError(f"{server.url} answers {answer.status} {answer.reason}")
    return answer


def _validated(server: Prometheus, form: TypeAdapter[ReportT], answer: HttpAnswer) -> ReportT:
    try:
        return form.validate_python(json.loads(answer.body, parse_float=_finite, parse_constant=_finite))
    except (ValueError, OverflowError, RecursionError) as error:  # a ValidationError is a ValueError
        raise RemoteError(f"{server.url} is not a Rankscope exporter or analyzer of this version") from error


def _finite(text: str) -> float:
    """Return a number of an answer. Raise ValueError if it is none that an exporter sends."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


class AnalyzedRuns:
    """The verdicts of the analyzer at a configured URL on this node's runs. Any thread may use it.

    It is asked only while a user reads this node's report, so that it has no load from thousands of nodes.
    """

    def __init__(
        self,
        server: Prometheus,
        fetch: Callable[[Prometheus], RemoteReport] = fetch_report,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._fetch, self._monotonic = server, fetch, monotonic
        self._read_at = self._known_at = float("-inf")
        self._runs: Sequence[RunReport] = ()

    def poll(self) -> None:
        """Ask the analyzer if the report is read. Raise RemoteError."""
        if self._monotonic() - self._read_at <= READ_FOR:
            asked_at = self._monotonic()
            self._runs = self._fetch(self._server).runs
            self._known_at = asked_at

    def add_to(self, node: NodeReport) -> NodeReport:
        """Return this node's report with what the analyzer says of its runs that are not whole here."""
        if not any(one.not_judged in ANALYZED for one in node.runs):
            return node
        self._read_at = self._monotonic()
        known = self._runs if self._monotonic() - self._known_at <= KNOWN_FOR else ()
        return replace(node, runs=ordered([self._analyzed(one, known) for one in node.runs]))

    def _analyzed(self, run: RunReport, known: Sequence[RunReport]) -> RunReport:
        if run.not_judged not in ANALYZED:
            return run
        same = (one for one in known if one.is_judged and (one.run, one.owner) == (run.run, run.owner))
        # Another job of the same name has other ranks here, or none.
        of_analyzer = next((one for one in same if places(run) <= places(one)), None)
        return replace(_with_verdict(run, of_analyzer), judged_by=self._server.url) if of_analyzer else run


def one_at_a_time(fetch: Fetch) -> Fetch:
    """Return the function, which raises FetchError while its last call has not returned.

    A server that sends an answer slowly would else keep a thread for each request.
    """
    lock = Lock()

    def fetch_alone(url: str, headers: Mapping[str, str]) -> HttpAnswer:
        if not lock.acquire(blocking=False):
            raise FetchError("the last request has not ended")
        try:
            return fetch(url, headers)
        finally:
            lock.release()

    return fetch_alone


def _with_verdict(run: RunReport, of_analyzer: RunReport) -> RunReport:
    """Return a node's report of a run with the analyzer's verdict."""
    lags = {rank.rank: rank for rank in of_analyzer.ranks}
    ranks = [
        replace(rank, lag_ratio=lags[rank.rank].lag_ratio, waits_least=lags[rank.rank].waits_least)
        for rank in run.ranks
    ]
    return replace(
        run,
        is_judged=True,
        missing_nodes=of_analyzer.missing_nodes,
        useful_ratio=of_analyzer.useful_ratio,
        lost=of_analyzer.lost,
        findings=of_analyzer.findings,
        pending=of_analyzer.pending,
        ranks=ranks,
    )
