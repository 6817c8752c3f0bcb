"""/-/ready, and POST /-/release and /-/resume: handles given back, so that a GPU can be reset, and taken again."""

from __future__ import annotations

import math
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from rankscope_exporter.gpu.sampler import ReleaseError

RELEASED_FOR = 900.0  # seconds, unless the request says otherwise: a reset takes some ten, a driver's upgrade minutes
LONGEST = 86_400.0  # seconds: a release that is forgotten must not leave a machine unwatched for good


class Gpus(Protocol):
    """What the sampler does for these pages."""

    @property
    def is_ready(self) -> bool:
        """Whether a scrape misses nothing that is there."""

    @property
    def is_released(self) -> bool:
        """Whether the handles are given back."""

    def release(self, seconds: float) -> None:
        """Give them back, for so many seconds at most. Raises ReleaseError."""

    def resume(self) -> None:
        """Take them again before that time is over; nothing happens if they are held."""


def add_lifecycle(app: FastAPI, gpus: Gpus, *, is_allowed: bool) -> None:
    """Add the pages; unless it `is_allowed`, a release is refused."""

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
    """Seconds of a release. Raises ValueError."""
    try:
        seconds = RELEASED_FOR if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"seconds: {given!r} is no number above 0 and up to {LONGEST:g}")
    return seconds


def _refusal(request: Request, is_allowed: bool) -> Response | None:
    if not is_allowed:
        return _answer(403, "not allowed: the exporter runs without --web.enable-lifecycle")
    # Browsers send it with every POST and tools do not: a page in an operator's browser must not blind a machine.
    if "origin" in request.headers:
        return _answer(403, "not allowed from a web page")
    return None


def _answer(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)
