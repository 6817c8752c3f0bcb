"""The pages /-/ready, POST /-/release, which closes the driver so that a GPU can be reset, and POST /-/resume."""

from __future__ import annotations

import math

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from rankscope_exporter.gpu.sampler import ReleaseError, Sampler

DEFAULT_RELEASE = 900.0  # seconds: a reset takes about ten, a driver upgrade several minutes
LONGEST_RELEASE = 86_400.0  # seconds: a forgotten release must not leave a machine without monitoring forever


def add_lifecycle(app: FastAPI, gpus: Sampler, *, is_allowed: bool) -> None:
    """Add the pages to the application. Unless `is_allowed`, requests to release the GPUs are rejected."""

    @app.api_route("/-/ready", methods=["GET", "HEAD"])
    def ready() -> Response:
        if gpus.is_ready:
            return _answer(200, "ready")
        return _answer(503, f"not ready: the GPUs {'are released' if gpus.is_released else 'have not been read yet'}")

    @app.post("/-/release")
    def release(request: Request) -> Response:
        if refusal := _refusal(request, is_allowed):
            return refusal
        try:
            seconds = duration(request.query_params.get("seconds"))
            gpus.release(seconds)
        except ValueError as error:
            return _answer(400, str(error))
        except ReleaseError as error:
            return _answer(503, f"not released: {error}")
        return _answer(200, f"released for {seconds:g} s, or until POST /-/resume")

    @app.post("/-/resume")
    def resume(request: Request) -> Response:
        if refusal := _refusal(request, is_allowed):
            return refusal
        gpus.resume()
        return _answer(200, "resumed")


def duration(given: str | None) -> float:
    """Return the duration of a release in seconds. Raises ValueError."""
    try:
        seconds = DEFAULT_RELEASE if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_RELEASE:
        raise ValueError(f"seconds: {given!r} is not a number above 0 and up to {LONGEST_RELEASE:g}")
    return seconds


def _refusal(request: Request, is_allowed: bool) -> Response | None:
    if not is_allowed:
        return _answer(403, "not allowed: the exporter runs without --web.enable-lifecycle")
    # Browsers send this header with every POST, tools do not: a web page in a browser must not stop the monitoring.
    if "origin" in request.headers:
        return _answer(403, "not allowed from a web page")
    return None


def _answer(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)
