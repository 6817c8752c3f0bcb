"""`rankscope stacks --all-nodes`: where the ranks of a run stand, from the exporters of its nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from rankscope.cli.explaining.fetching import fetch
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, connector
from rankscope.cli.printable import printable
from rankscope.cli.rank_stacks import RankStacks
from rankscope.cli.show_stacks import is_wanted
from rankscope.cli.stacks_page import lines
from rankscope_exporter.report.remote import Fetch, RemoteError, RemoteReport, fetch_report, fetch_stacks
from rankscope_exporter.top.servers import SERVERS_LIMIT, node_name

AT_ONCE = 32
"""Servers that are asked at the same time."""
FAILURES_SHOWN = 20
ResultT = TypeVar("ResultT")
Answers = Mapping[Prometheus, ResultT | RemoteError]


class NoRunError(Exception):
    """No run can be shown. The message has the reason."""


def show(urls: Sequence[str], headers: Sequence[str], run: str | None, rank: str | None, fetch: Fetch = fetch) -> int:
    """Print where the ranks of a run stand. Return the exit status: 1 if a rank or node does not answer, 2 if all.

    The headers, and passwords in the URLs, are for these servers, not for the exporters that an analyzer names.
    """
    connect = connector(headers, fetch)
    try:
        reports = _ask_all([connect(url, None) for url in dict.fromkeys(urls)], fetch_report)
        name = run or _only_run(reports)
    except (PrometheusError, NoRunError) as error:
        _warn(str(error))
        return 2
    exporters = [*_exporters(reports, name, lambda url: Prometheus(url, fetch=fetch))]
    answers = _ask_all(exporters[:SERVERS_LIMIT], lambda server: fetch_stacks(server, name))
    failures = [*_failures(reports), *_failures(answers)]
    if len(exporters) > SERVERS_LIMIT:
        failures.append(f"{len(exporters)} nodes, asking only {SERVERS_LIMIT}")
    for failure in failures[:FAILURES_SHOWN]:
        _warn(failure)
    if len(failures) > FAILURES_SHOWN:
        _warn(f"{len(failures) - FAILURES_SHOWN} more nodes do not answer")
    found = [one for one in _ranks(answers) if is_wanted(one.run, one.rank, name, rank)]
    if not found:
        _warn(f"no living rank{'' if rank is None else f' {rank}'} of run {name} on the nodes that answer")
        return 2
    are_several = len({one.owner for one in found}) > 1
    sys.stdout.writelines(f"{line}\n" for line in lines(found, lambda owner: str(owner) if are_several else ""))
    return 1 if failures or any(one.reason for one in found) else 0


def _ask_all(servers: Sequence[Prometheus], ask: Callable[[Prometheus], ResultT]) -> Answers[ResultT]:
    """Return the answer of each server, or why it has none."""

    def try_to_ask(server: Prometheus) -> ResultT | RemoteError:
        try:
            return ask(server)
        except RemoteError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return dict(zip(servers, threads.map(try_to_ask, servers), strict=True))


def _only_run(reports: Answers[RemoteReport]) -> str:
    """Return the only living run. Raise NoRunError."""
    known = [one for one in reports.values() if isinstance(one, RemoteReport)]
    if not known:
        raise NoRunError("; ".join(map(str, reports.values())))
    names = sorted({run.run for one in known for run in one.runs if run.living})
    if len(names) > 1:
        raise NoRunError(f"several runs found; choose one with --run: {', '.join(names)}")
    if not names:
        raise NoRunError("no run has a living rank")
    return names[0]


def _exporters(reports: Answers[RemoteReport], run: str, connect: Callable[[str], Prometheus]) -> Iterator[Prometheus]:
    """Yield the exporters that have the run, and all that an analyzer names: it does not know which of them have it."""
    named = {server.url for server in reports}
    for server, report in reports.items():
        if isinstance(report, RemoteError):
            continue
        if not report.targets and any(one.run == run and one.living for one in report.runs):
            yield server
        for url in report.exporters if report.targets else ():
            if url not in named:
                named.add(url)
                with suppress(PrometheusError):  # no URL of a server: an analyzer can send any text
                    yield connect(url)


def _ranks(answers: Answers[Sequence[RankStacks]]) -> Iterable[RankStacks]:
    """Return the ranks of all answers, each process once: two URLs may lead to one exporter."""
    every = [one for answer in answers.values() if not isinstance(answer, RemoteError) for one in answer]
    return {(one.owner, one.rank, one.node, one.pid): one for one in every}.values()


def _failures(answers: Answers[ResultT]) -> Iterator[str]:
    for server, answer in answers.items():
        if isinstance(answer, RemoteError):
            yield f"{node_name(server.url)}: {answer}"


def _warn(text: str) -> None:
    print(f"rankscope stacks: {printable(text)}", file=sys.stderr)  # noqa: T201 - a command
