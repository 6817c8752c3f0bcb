"""The exporter's pages: /metrics, /-/healthy, /api/v1/runs, the status page, and lifecycle.py's; 404 elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_exporter.exposition.scrape import Scrape, negotiated
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.web.connections import Page
from rankscope_exporter.web.lifecycle import Gpus, add_lifecycle
from rankscope_exporter.web.pages import Pages, SingleFlight, held, send_page, turn
from rankscope_exporter.web.status_assets import POLICY
from rankscope_exporter.web.status_page import render_status

READ = ["GET", "HEAD"]
ASKED = (b"accept", b"accept-encoding")
# They answer the status page and lifecycle.py's requests; more would only leave memory behind.
THREADS = 4


@asynccontextmanager
async def few_threads(_: FastAPI) -> AsyncIterator[None]:
    """The application's lifespan, with few worker threads."""
    current_default_thread_limiter().total_tokens = THREADS
    yield


class MetricsFirst:
    """Answers /metrics, and leaves everything else to the application.

    Not a route of FastAPI's: that costs as much as the scrape, 0.4 ms. And in the event loop, not on a thread: a scrape
    takes a millisecond or two with the interpreter's lock held, so that threads would only take turns.
    """

    def __init__(self, app: ASGIApp, scrape: Scrape) -> None:
        self._app = app
        self._pages = Pages(scrape.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for `/metrics`, and leave every other one to FastAPI."""
        if scope["type"] != "http" or scope["path"] != "/metrics":
            await self._app(scope, receive, send)
        elif scope["method"] in READ:
            await self._answer(scope, send)
        else:
            await PlainTextResponse("", status_code=405, headers={"Allow": ", ".join(READ)})(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send) -> None:
        asked = dict(scope["headers"])
        form, headers = negotiated(*(asked.get(name, b"").decode("latin-1") for name in ASKED))
        page = await self._pages.next(form)
        headers["Content-Length"] = str(len(page.body))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        with held(page, scope):
            await turn(scope)  # those who waited for it get it one after another
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send_page(page if scope["method"] == "GET" else Page(b""), scope, send)


def create_app(scrape: Scrape, gpus: Gpus, reporter: Reporter | None = None, *, has_lifecycle: bool = False) -> ASGIApp:
    """The application. `gpus` says whether a scrape would tell the truth already; `has_lifecycle` allows a release."""
    app = FastAPI(lifespan=few_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.api_route("/-/healthy", methods=READ)
    async def healthy() -> Response:
        return PlainTextResponse("healthy\n")

    status_page = SingleFlight(lambda: render_status(scrape.collect(), reporter))

    @app.api_route("/", methods=READ)
    async def status() -> Response:
        return HTMLResponse(await status_page.next(), headers={"Content-Security-Policy": POLICY})

    if reporter:
        _add_api(app, reporter)
    add_lifecycle(app, gpus, is_allowed=has_lifecycle)
    return MetricsFirst(app, scrape)


def _add_api(app: FastAPI, reporter: Reporter) -> None:
    made = SingleFlight(lambda: as_json(reporter.report()))

    @app.api_route("/api/v1/runs", methods=READ)
    async def runs() -> Response:
        try:
            return Response(await made.next(), media_type="application/json")
        except OutdatedError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
