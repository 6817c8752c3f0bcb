"""Exporters and analyzers that `rankscope top --url` asks, each in a thread of its own, so that none delays another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Condition, Event, Thread
from urllib.parse import urlsplit

from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.record.quantities import duration
from rankscope_exporter.report.gpus import GpuProblem, GpuReport
from rankscope_exporter.report.remote import KNOWN_FOR, RemoteError, RemoteReport, fetch_gpus, fetch_report
from rankscope_exporter.report.runs import ELSEWHERE, CaptureReport, NodeReport, RunReport, ordered, places
from rankscope_exporter.top.trends import RunKey, key_of

INTERVAL = 1.0
ASKED_PER_SECOND = 20.0
"""The most servers that are asked in a second: more servers are each asked less often."""
ANSWERS_WITHIN = 5.0
SERVERS_LIMIT = 256
"""The most servers, with the exporters of an analyzer."""
DEFAULT_PORT = 10417
HINT = " (set --url)"


@dataclass(frozen=True)
class NodeState:
    """The last answer of a server."""

    name: str
    error: str
    """Why it does not answer; empty if it does."""
    silent_seconds: float
    """Seconds since its last answer, or since it was first asked."""
    gpus: Sequence[GpuReport] = ()
    gpu_problems: Sequence[GpuProblem] = ()
    runs: Sequence[RunReport] = ()
    is_analyzer: bool = False
    is_only_unreachable: bool = False
    """True if it answers its analyzer, but not this machine."""


@dataclass(frozen=True)
class ServersReport:
    """The runs of several servers, for `--json`."""

    at: float
    failures: Mapping[str, str]
    """Why servers do not answer, by name."""
    runs: Sequence[RunReport]


@dataclass
class _Server:
    """A server and its last answer. Its thread writes it, under the lock of `Servers`."""

    server: Prometheus
    asked_since: float
    is_of_analyzer: bool = False
    error: str = ""
    has_been_asked: bool = False
    answered_at: float | None = None
    report: RemoteReport | None = None
    gpus: Sequence[GpuReport] = ()
    left_out: int = 0
    """How many of an analyzer's exporters are not asked, because they are too many."""


class Servers:
    """All servers. They are asked until the end of the program or of `asking`."""

    def __init__(
        self,
        servers: Iterable[Prometheus],
        connect: Callable[[str], Prometheus],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the servers that the user names. `connect` returns a client, without credentials, for what they name."""
        self._connect, self._monotonic = connect, monotonic
        self._changed, self._over = Condition(), Event()
        self._servers: dict[str, _Server] = {}
        for server in servers:
            self._add(server)

    @contextmanager
    def asking(self) -> Iterator[Servers]:
        """Ask all servers until the end of the context."""
        with self._changed:
            for one in self._servers.values():
                self._start(one)
        try:
            yield self
        finally:
            self._over.set()

    def wait(self, seconds: float) -> Sequence[str]:
        """Wait until each server has answered or failed, up to some seconds. Return the errors if none answers."""
        with self._changed:
            self._changed.wait_for(lambda: all(one.has_been_asked for one in self._servers.values()), seconds)
            every = self._servers.values()
            return [] if any(one.report for one in every) else [one.error or "no answer yet" for one in every]

    @property
    def urls(self) -> Sequence[str]:
        """Return the URLs of all servers."""
        return [*self._servers]

    @property
    def left_out(self) -> int:
        """Return how many exporters of an analyzer are not asked, because they are too many."""
        return max(one.left_out for one in self._servers.values())

    def nodes(self) -> Sequence[NodeState]:
        """Return the state of each server."""
        with self._changed:
            every = self._servers.values()
            failing = {url for one in every if one.report for url in one.report.failures}
            return [self._state(one, failing) for one in every]

    def _state(self, one: _Server, failing: Set[str]) -> NodeState:
        now, url = self._monotonic(), one.server.url
        silent = now - (one.asked_since if one.answered_at is None else one.answered_at)
        is_known = one.answered_at is not None and silent <= KNOWN_FOR + self._interval()
        error = one.error or ("" if is_known else f"no answer for {duration(silent)}")
        report = one.report if is_known else None
        return NodeState(
            name=node_name(url),
            error=error.removesuffix(HINT),
            silent_seconds=silent,
            gpus=one.gpus if is_known else (),
            gpu_problems=report.gpu_problems if report else (),
            runs=report.runs if report else (),
            is_analyzer=bool(one.report and one.report.targets),
            is_only_unreachable=one.is_of_analyzer and url not in failing,
        )

    def _interval(self) -> float:
        return max(INTERVAL, len(self._servers) / ASKED_PER_SECOND)

    def _add(self, server: Prometheus, *, is_of_analyzer: bool = False) -> _Server:
        one = _Server(server, self._monotonic(), is_of_analyzer)
        self._servers[server.url] = one
        return one

    def _start(self, one: _Server) -> None:
        Thread(target=self._ask_until_over, args=(one,), daemon=True).start()

    def _ask_until_over(self, one: _Server) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            began = self._monotonic()
            try:
                report, error = fetch_report(one.server, ANSWERS_WITHIN), ""
                gpus = () if report.targets else fetch_gpus(one.server, ANSWERS_WITHIN)
            except RemoteError as failure:
                error = str(failure)
            with self._changed:
                one.error, one.has_been_asked = error, True
                if not error:
                    one.report, one.gpus, one.answered_at = report, gpus, began
                    one.left_out = self._follow(report)
                self._changed.notify_all()
                pause = max(self._interval() - (self._monotonic() - began), 0.1)

    def _follow(self, report: RemoteReport) -> int:
        """Ask an analyzer's exporters as well: it knows only runs that span nodes. Return how many are too many."""
        new = [url for url in report.exporters if url not in self._servers]
        room = max(SERVERS_LIMIT - len(self._servers), 0)
        for url in new[:room]:
            with suppress(PrometheusError):  # no URL of a server: an analyzer can send any text
                self._start(self._add(self._connect(url), is_of_analyzer=True))
        return len(new[room:]) + max(sum(report.targets.values()) - len(report.exporters), 0)


def node_name(url: str) -> str:
    """Return the host of a URL, with the port if it is not an exporter's usual one."""
    parts = urlsplit(url)
    port = "" if parts.port in (None, DEFAULT_PORT) else f":{parts.port}"
    return f"{parts.hostname or url}{port}{parts.path.rstrip('/')}"


def merged(nodes: Sequence[NodeState], at: float) -> NodeReport:
    """Return the runs of all nodes, each once: from who diagnoses it, or else from its parts on these nodes."""
    by_key: dict[RunKey, list[RunReport]] = {}
    for run in (run for node in nodes for run in node.runs):
        by_key.setdefault(key_of(run), []).append(run)
    return NodeReport(at, ordered([run for parts in by_key.values() for run in _merge(parts)]))


def _merge(parts: Sequence[RunReport]) -> Iterator[RunReport]:
    """Yield the runs of one name and owner. Another job of the same name has other ranks."""
    whole: list[RunReport] = []
    for run in sorted(parts, key=lambda run: -len(run.ranks)):
        if run.is_judged and not run.judged_by and not any(places(run) <= places(one) for one in whole):
            whole.append(run)
    rest = [run for run in parts if run.judged_by or not run.is_judged]
    for one in whole:
        of_nodes = [run for run in rest if places(run) <= places(one)]
        yield replace(one, captures=_captures([one, *of_nodes]))
    left = [run for run in rest if not any(places(run) <= places(one) for one in whole)]
    if left:
        yield _joined(left)


def _joined(parts: Sequence[RunReport]) -> RunReport:
    """Return a run from its parts on several nodes."""
    first = next((run for run in parts if run.is_judged), parts[0])
    ranks = {rank.rank: rank for run in parts for rank in run.ranks}
    nodes = tuple(sorted({node for run in parts for node in run.nodes}))
    reason = first.not_judged_reason
    if first.not_judged == ELSEWHERE and len(parts) > 1:
        known = f"{len(ranks)} of its {first.world_size} ranks"
        reason = f"{known} are on these {len(nodes)} nodes, of which none knows the others"
    return replace(
        first,
        not_judged_reason=reason,
        nodes=nodes,
        living=sum(rank.is_alive for rank in ranks.values()),
        ended=sum(not rank.is_alive for rank in ranks.values()),
        ranks=[ranks[number] for number in sorted(ranks)],
        captures=_captures(parts),
    )


def _captures(parts: Sequence[RunReport]) -> Sequence[CaptureReport]:
    """Return the captures of a run's parts, which nodes may report twice."""
    return [*{(one.node, one.path): one for run in parts for one in run.captures}.values()]
