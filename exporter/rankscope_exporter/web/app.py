"""The exporter's HTTP face: /metrics, /-/healthy, the status page, and lifecycle.py's pages; 404 elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from rankscope_exporter.scrape import Scrape
from rankscope_exporter.web.lifecycle import Gpus, add_lifecycle
from rankscope_exporter.web.status_page import render_status

READ = ["GET", "HEAD"]
# A scrape holds the interpreter's lock nearly all the time, so more threads make nothing faster: 64 scrapers at once
# left the default's 40 threads behind, and 14 MiB.
THREADS = 4


@asynccontextmanager
async def few_threads(_: FastAPI) -> AsyncIterator[None]:
    """The application's lifespan, with few worker threads."""
    current_default_thread_limiter().total_tokens = THREADS
    yield


def create_app(scrape: Scrape, gpus: Gpus, *, has_lifecycle: bool = False) -> FastAPI:
    """The application. `gpus` says whether a scrape would tell the truth already; `has_lifecycle` allows a release."""
    app = FastAPI(lifespan=few_threads, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    # Plain functions, not coroutines: a scrape reads files, and FastAPI runs these on worker threads.
    @app.api_route("/metrics", methods=READ)
    def metrics(request: Request) -> Response:
        headers = request.headers
        body, answer = scrape.render(headers.get("accept", ""), headers.get("accept-encoding", ""))
        return Response(body, headers=answer)

    @app.api_route("/-/healthy", methods=READ)
    def healthy() -> Response:
        return PlainTextResponse("healthy\n")

    @app.api_route("/", methods=READ)
    def status() -> Response:
        return HTMLResponse(render_status(scrape.collect()))

    add_lifecycle(app, gpus, is_allowed=has_lifecycle)
    return app
