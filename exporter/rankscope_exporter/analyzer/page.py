"""The analyzer's pages: / as text, /api/v1/runs, /metrics, /-/healthy and /-/ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp

from rankscope import __version__
from rankscope_exporter.analyzer.metrics import AnalyzerCollector
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.diagnosis.readings import run_title
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.findings import (
    FindingReport,
    PendingReport,
    pending_reason,
    report_finding,
    report_pending,
)
from rankscope_exporter.web.app import READ, MetricsFirst, limit_threads
from rankscope_exporter.web.pages import SingleFlight


@dataclass(frozen=True)
class RunOfNodes:
    """A run that spans nodes. Its fields have the names that they have in the API of an exporter."""

    run: str
    owner: str
    is_judged: bool
    not_judged: str
    """The reason why it is not; empty if it is."""
    missing_nodes: tuple[str, ...]
    """The nodes that do not answer: late ranks and transfer are unknown meanwhile."""
    world_size: int
    living: int
    nodes: tuple[str, ...]
    findings: tuple[FindingReport, ...]
    pending: tuple[PendingReport, ...]


@dataclass(frozen=True)
class AnalyzerReport:
    """The state of the analyzer."""

    at: float
    """The unix time of the last second that was judged."""
    targets: Mapping[str, int]
    """The number of targets that answer (`up`) and that do not (`failing`)."""
    runs: tuple[RunOfNodes, ...]


def report_of(analyzer: Analyzer, targets: Mapping[str, int]) -> AnalyzerReport:
    """Return the report of what was judged last."""
    look = analyzer.look
    return AnalyzerReport(look.unix if look else 0.0, dict(targets), tuple(_runs(analyzer)))


def _runs(analyzer: Analyzer) -> Iterator[RunOfNodes]:
    look, missing = analyzer.look, analyzer.missing
    verdicts = {verdict.run: verdict for verdict in look.judged.verdicts} if look else {}
    for run, readings in look.readings.items() if look else ():
        verdict = verdicts.get(run)
        yield RunOfNodes(
            run=run_title(run),
            owner=run[1],
            is_judged=verdict is not None,
            not_judged=look.judged.not_judged.get(run, "") if look else "",
            missing_nodes=tuple(missing.get(run, ())),
            world_size=max(one.world_size for one in readings),
            living=sum(one.ended is None for one in readings),
            nodes=tuple(sorted({one.node for one in readings if one.node})),
            findings=tuple(report_finding(run, one, verdict.at, look.unix) for one in verdict.findings)
            if verdict and look
            else (),
            pending=tuple(report_pending(run, one) for one in verdict.pending) if verdict else (),
        )


def as_text(report: AnalyzerReport) -> str:
    """Return the report in sentences."""
    up, failing = report.targets.get("up", 0), report.targets.get("failing", 0)
    lines = [f"Rankscope analyzer {__version__}", f"Targets that answer: {up}. Targets that do not: {failing}.", ""]
    nothing = "No run spans the nodes of the targets that answer." if up else "No target answers, so no run is known."
    lines += [line for run in report.runs for line in _lines(run)] or [nothing]
    return "\n".join(lines) + "\n"


def _lines(run: RunOfNodes) -> Sequence[str]:
    lines = [f"{run.run} (owner {run.owner}): {run.living} of {run.world_size} ranks on {', '.join(run.nodes)}"]
    if run.missing_nodes:
        lines.append(f"  Not fully diagnosed: no answer from {', '.join(run.missing_nodes)}.")
    if run.not_judged:
        lines.append(f"  Not diagnosed: {run.not_judged}.")
    lines += [f"  {one.severity}: {one.sentence}. {one.advice}" for one in run.findings]
    lines += [f"  Not yet an alert: {one.sentence} ({pending_reason(one)})." for one in run.pending]
    if run.is_judged and not (run.findings or run.missing_nodes):
        lines.append("  No problem found.")
    return lines


def create_analyzer_app(scrape: Scrape, analyzer: Analyzer, collector: AnalyzerCollector) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(lifespan=limit_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    text = SingleFlight(lambda: as_text(report_of(analyzer, collector.targets())))
    json = SingleFlight(lambda: as_json(report_of(analyzer, collector.targets())))

    @app.api_route("/", methods=READ)
    async def status() -> Response:
        return PlainTextResponse(await text.next())

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
