"""The analyzer's pages: /, /api/v1/runs, /metrics, /-/healthy and /-/ready."""

from __future__ import annotations

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
from rankscope_exporter.report.runs import NodeReport, RunReport, report_of_look
from rankscope_exporter.web.app import READ, MetricsFirst, limit_threads
from rankscope_exporter.web.pages import SingleFlight
from rankscope_exporter.web.status_assets import POLICY
from rankscope_exporter.web.status_page import as_page, link_below
from rankscope_exporter.web.status_runs import legend, run_section
from rankscope_exporter.web.verdict import box, title, verdict

PROGRAM = "Rankscope analyzer"
NO_RUN = "No run spans the nodes of the targets that answer."
NO_TARGET = "No target answers, so no run is known."


@dataclass(frozen=True)
class AnalyzerReport:
    """The state of the analyzer."""

    at: float
    """The unix time of the last second that was judged; 0 before the first one."""
    targets: Mapping[str, int]
    """The number of targets that answer (`up`) and that do not (`failing`)."""
    runs: Sequence[RunReport]


def report_of(analyzer: Analyzer, targets: Mapping[str, int]) -> AnalyzerReport:
    """Return the report of what was judged last."""
    look = analyzer.look
    report = report_of_look(look, missing=analyzer.missing) if look else NodeReport(0.0, ())
    return AnalyzerReport(report.at, dict(targets), report.runs)


def as_html(report: AnalyzerReport) -> str:
    """Return the status page."""
    node, up = NodeReport(report.at, report.runs), report.targets.get("up", 0)
    about = f"version {__version__} · {up} of {sum(report.targets.values())} targets answer"
    nothing = box("unknown", f"<p>{escape(NO_RUN if up else NO_TARGET)}</p>")
    return as_page(
        title(node, (), PROGRAM),
        f"""<main><h1>{PROGRAM} <small>{escape(about)}</small></h1>
<p id="stale" class="bad" hidden></p>{verdict(node, (), "") if report.runs else nothing}
{"".join(map(run_section, report.runs))}{legend(node)}</main>""",
    )


def create_analyzer_app(scrape: Scrape, analyzer: Analyzer, collector: AnalyzerCollector) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(lifespan=limit_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    html = SingleFlight(lambda: as_html(report_of(analyzer, collector.targets())))
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
        is_ready = collector.targets()["up"] > 0
        return PlainTextResponse("ready\n" if is_ready else "no target has answered\n", 200 if is_ready else 503)

    return MetricsFirst(app, scrape)
