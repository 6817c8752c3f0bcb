"""The command `rankscope report`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope.cli.explaining.fetching import within
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.cli.printable import printable
from rankscope_exporter.job_report import queries, records, saved, slurm
from rankscope_exporter.job_report.job import Job, NoJobError, select_job
from rankscope_exporter.job_report.page import Prices, group_lines, lines
from rankscope_exporter.job_report.short import as_json

QUERY_TIMEOUT = 120.0  # seconds for all queries to a Prometheus
LINE_LIMIT = 1000
ERROR_LIMIT = 4000
NO_PRICES = Prices()


@dataclass(frozen=True)
class ReportRequest:
    """The wanted report and its source: a run directory, the exporter's state directory or a Prometheus."""

    run: str | None = None
    job_id: str | None = None
    owner: str | None = None
    run_dir: Path | None = None
    state_dir: Path | None = None
    url: str | None = None
    by: str | None = None
    days: float = 7.0
    prices: Prices = NO_PRICES
    is_json: bool = False


def show(request: ReportRequest, connect: Callable[[str, float | None], Prometheus] = Prometheus) -> int:
    """Print the report. Return the exit status: 2 if there is nothing to report, with the reason on stderr."""
    try:
        printed = [*_groups(request, connect)] if request.by else [*_page(request, connect)]
    except (NoJobError, PrometheusError, TimeoutError) as error:
        print(f"rankscope report: {printable(str(error), ERROR_LIMIT)}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    sys.stdout.writelines(f"{printable(line, LINE_LIMIT if not request.is_json else None)}\n" for line in printed)
    return 0


def _page(request: ReportRequest, connect: Callable[[str, float | None], Prometheus]) -> Iterable[str]:
    job = _job(request, connect)
    job_id = job.slurm.get("job_id", "")
    if job_id.isdecimal() and not job.is_partial and (allocation := slurm.ask(job_id)):
        job = job.with_allocation(allocation, time.time())
    return [as_json(job, request.prices)] if request.is_json else lines(job, request.prices)


def _job(request: ReportRequest, connect: Callable[[str, float | None], Prometheus]) -> Job:
    run, owner, url = request.run, request.owner, request.url
    job_id = None if request.job_id is None else slurm.number(request.job_id)
    if request.run_dir:
        return select_job(records.jobs(request.run_dir), run, job_id, owner)
    if request.state_dir:
        return select_job(saved.jobs(request.state_dir), run, job_id, owner)
    if url is None:
        raise NoJobError("no data source: give --state-dir, --url or a run directory")
    return within(QUERY_TIMEOUT, lambda: queries.job(lambda at: connect(url, at), run, job_id, owner))


def _groups(request: ReportRequest, connect: Callable[[str, float | None], Prometheus]) -> Iterable[str]:
    by, url = request.by, request.url
    if by is None or url is None:
        raise NoJobError("--by needs a Prometheus: give --url")
    found = within(QUERY_TIMEOUT, lambda: queries.groups(connect(url, None), by, request.days))
    return group_lines(found, by, request.days, request.prices)
