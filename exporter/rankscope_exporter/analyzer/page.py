"""The analyzer's pages: /, /api/v1/runs, /metrics, /-/healthy and /-/ready."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp

from rankscope import __version__
from rankscope_exporter.analyzer.metrics import AnalyzerCollector
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.rates import RecentRates
from rankscope_exporter.report.runs import NodeReport, RunReport, report_of_look
from rankscope_exporter.web.app import READ, MetricsFirst, limit_threads
from rankscope_exporter.web.pages import SingleFlight
from rankscope_exporter.web.status_assets import POLICY
from rankscope_exporter.web.status_page import as_page, head, link_below
from rankscope_exporter.web.status_runs import legend, run_section
from rankscope_exporter.web.table import Cell, Column, Row, table
from rankscope_exporter.web.verdict import Verdict, verdict

PROGRAM = "Rankscope analyzer"
NO_RUN = "No run spans the nodes of the targets that answer."
NO_TARGET = "No target answers, so no run is known."
SHOWN_FAILURES = 20
"""The most targets that do not answer whose names and reasons are shown."""
SHOWN_EXPORTERS = 256
"""The most targets whose URLs `/api/v1/runs` has."""


@dataclass(frozen=True)
class AnalyzerReport:
    """The state of the analyzer."""

    at: float
    """The unix time of the last second that was judged; 0 before the first one."""
    targets: Mapping[str, int]
    """The number of targets that answer (`up`) and that do not (`failing`)."""
    failures: Mapping[str, str]
    """Why targets do not answer, by name: the first ones."""
    exporters: Sequence[str]
    """The URLs of the targets: the first ones. `rankscope top` asks them for what the analyzer does not know."""
    runs: Sequence[RunReport]


def report_of(analyzer: Analyzer, targets: Mapping[str, str]) -> AnalyzerReport:
    """Return the report of what was judged last. `targets` are as those of `AnalyzerCollector`."""
    look = analyzer.look
    report = report_of_look(look, missing=analyzer.missing) if look else NodeReport(0.0, ())
    failures = sorted((name, reason) for name, reason in targets.items() if reason)
    counts = {"up": len(targets) - len(failures), "failing": len(failures)}
    exporters = sorted(targets)[:SHOWN_EXPORTERS]
    return AnalyzerReport(report.at, counts, dict(failures[:SHOWN_FAILURES]), exporters, report.runs)


def as_html(report: AnalyzerReport, rates: RecentRates) -> str:
    """Return the status page."""
    node, up = NodeReport(report.at, report.runs), report.targets.get("up", 0)
    about = f"version {__version__} · {up} of {sum(report.targets.values())} targets answer"
    nothing = Verdict("unknown", "No run", f'<p class="said">{escape(NO_RUN if up else NO_TARGET)}</p>')
    found = verdict(node, (), "") if report.runs else nothing
    runs = "".join(run_section(run, rates.steps((run.run, run.owner))) for run in report.runs)
    main = f"{runs}{legend(node)}{_failures(report)}"
    return as_page(found, PROGRAM, head(PROGRAM, about, time.time()), main)


def _failures(report: AnalyzerReport) -> str:
    """Return the targets that do not answer as HTML."""
    rows = [Row((Cell(name), Cell(reason))) for name, reason in report.failures.items()]
    hidden = report.targets.get("failing", 0) - len(rows)
    more = f"<p>{hidden} more do not answer.</p>" if hidden else ""
    found = table((Column("target"), Column("reason")), rows, "Targets that do not answer")
    return f"<section><h2>Targets that do not answer</h2>{found}{more}</section>" if rows else ""


def create_analyzer_app(scrape: Scrape, analyzer: Analyzer, collector: AnalyzerCollector) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(lifespan=limit_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    html = SingleFlight(lambda: as_html(report_of(analyzer, collector.targets()), collector.rates))
    json = SingleFlight(lambda: as_json(report_of(analyzer, collector.targets())))

    @app.api_route("/", methods=READ)
    async def status(request: Request) -> Response:
        page = link_below(await html.next(), request.headers.get("X-Forwarded-Prefix", ""))
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Vary": "X-Forwarded-Prefix"})

    @app.api_route("/api/v1/runs", methods=READ)
    async def runs() -> Response:
        return Response(await json.next(), media_type="application/json")

    @app.api_route("/-/healthy", methods=READ)
    async def healthy() -> Response:
        return PlainTextResponse("healthy\n")

    @app.api_route("/-/ready", methods=READ)
    async def ready() -> Response:
        is_ready = not all(collector.targets().values() or ["no target"])
        return PlainTextResponse("ready\n" if is_ready else "no target has answered\n", 200 if is_ready else 503)

    return MetricsFirst(app, scrape)
