"""The exporter's pages: /, /metrics, /-/healthy, those below /api/v1, and those of lifecycle.py.

All other paths are 404.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_exporter.exposition.scrape import Scrape, accepts_gzip, negotiate_format
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.node_facts.recorder import NodeFacts
from rankscope_exporter.node_facts.wire import ANALYZER, HANGING, read_runs
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.gpus import GpusReport, report_gpus
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.report.values import Values
from rankscope_exporter.web.lifecycle import add_lifecycle
from rankscope_exporter.web.pages import (
    METRICS,
    Pages,
    SharedResponse,
    SingleFlight,
    send_body,
    track_page,
    wait_for_turn,
)
from rankscope_exporter.web.stacks import add_stacks
from rankscope_exporter.web.status_assets import POLICY
from rankscope_exporter.web.status_page import link_below, render_status

FACTS = "/api/v1/facts"
READ = ["GET", "HEAD"]
NEGOTIATION_HEADERS = (b"accept", b"accept-encoding")
# They render the status page and handle lifecycle.py's requests. More threads would only take memory.
THREADS = 4


@asynccontextmanager
async def limit_threads(_: FastAPI) -> AsyncIterator[None]:
    """Limit the worker threads during the application's lifespan."""
    current_default_thread_limiter().total_tokens = THREADS
    yield


class MetricsFirst:
    """ASGI middleware that answers /metrics and passes all other requests to the application.

    A FastAPI route would cost 0.4 ms, as much as the scrape. Runs on the event loop, not on threads: a scrape holds the
    GIL for one or two milliseconds, so threads would not run in parallel.
    """

    def __init__(self, app: ASGIApp, scrape: Scrape) -> None:
        self._app = app
        self._pages = Pages(scrape.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for `/metrics`, and pass any other request to FastAPI."""
        if scope["type"] != "http" or scope["path"] != METRICS:
            await self._app(scope, receive, send)
        elif scope["method"] in READ:
            await self._answer(scope, send)
        else:
            await PlainTextResponse("", status_code=405, headers={"Allow": ", ".join(READ)})(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send) -> None:
        request = dict(scope["headers"])
        form, headers = negotiate_format(*(request.get(name, b"").decode("latin-1") for name in NEGOTIATION_HEADERS))
        page = await self._pages.next(form)
        headers["Content-Length"] = str(len(page.body))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        with track_page(page, scope):
            await wait_for_turn(scope)  # requests that waited for the same page are answered one after another
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send_body((page.body,) if scope["method"] == "GET" else (), scope, send)


def create_app(
    scrape: Scrape,
    gpus: Sampler,
    reporter: Reporter | None = None,
    facts: NodeFacts | None = None,
    *,
    node: str = "",
    has_lifecycle: bool = False,
    stacks_of: Callable[[], Scan | None] | None = None,
) -> ASGIApp:
    """Return the ASGI application of the node with this name.

    `gpus` knows whether the exporter is ready; `has_lifecycle` allows a release. `stacks_of`, if
    the stacks of ranks are allowed, returns the ranks.
    """
    app = FastAPI(lifespan=limit_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.api_route("/-/healthy", methods=READ)
    async def healthy() -> Response:
        return PlainTextResponse("healthy\n")

    status_page = SingleFlight(lambda: render_status(scrape.collect(), reporter, name=node))

    @app.api_route("/", methods=READ)
    async def status(request: Request) -> Response:
        page = link_below(await status_page.next(), request.headers.get("X-Forwarded-Prefix", ""))
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Vary": "X-Forwarded-Prefix"})

    if reporter:
        _add_api(app, scrape, reporter)
    if facts:
        _add_facts(app, facts, reporter)
    add_stacks(app, stacks_of)
    add_lifecycle(app, gpus, is_allowed=has_lifecycle)
    return MetricsFirst(app, scrape)


def _add_api(app: FastAPI, scrape: Scrape, reporter: Reporter) -> None:
    page = SingleFlight(lambda: as_json(reporter.report()))
    gpu_page = SingleFlight(lambda: as_json(_gpus(scrape, reporter)))

    @app.api_route("/api/v1/gpus", methods=READ)
    async def gpus() -> Response:
        return Response(await gpu_page.next(), media_type="application/json")

    @app.api_route("/api/v1/runs", methods=READ)
    async def runs() -> Response:
        try:
            return Response(await page.next(), media_type="application/json")
        except OutdatedError as error:
            return JSONResponse({"error": str(error)}, status_code=503)


def _gpus(scrape: Scrape, reporter: Reporter) -> GpusReport:
    now = time.time()
    return GpusReport(now, report_gpus(Values(scrape.collect()), reporter.look(), now))


def _add_facts(app: FastAPI, facts: NodeFacts, reporter: Reporter | None) -> None:
    @app.api_route(FACTS, methods=READ)
    async def answer(request: Request) -> Response:
        try:
            after = float(request.query_params["after"]) if "after" in request.query_params else None
        except ValueError:
            return JSONResponse({"error": "after is not a number"}, status_code=400)
        if reporter and (analyzer := request.headers.get(ANALYZER, "")):
            reporter.analyzer.record_pull(analyzer, read_runs(request.headers.get(HANGING, "")))
        is_packed = accepts_gzip(request.headers.get("Accept-Encoding", ""))
        headers = {"Content-Encoding": "gzip"} if is_packed else {}
        parts = facts.answer(after, time.monotonic(), is_packed=is_packed)
        return SharedResponse(parts, {**headers, "Vary": "Accept-Encoding"})
