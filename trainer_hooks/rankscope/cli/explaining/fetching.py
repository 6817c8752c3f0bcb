"""One request to an HTTP server that may be hostile: limited in bytes and time, redirects only to http(s)."""

from __future__ import annotations

import ipaddress
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from typing import NamedTuple, TypeVar

ANSWERS_WITHIN = 20.0  # seconds without a byte; a query takes milliseconds
BODY_LIMIT = 8 * 1024**2  # bytes: some 15,000 ranks
REFUSAL_LIMIT = 64 * 1024  # bytes of an error's body
REDIRECTS = 5
REDIRECTING = (301, 302, 303, 307, 308)

ResultT = TypeVar("ResultT")


class Answer(NamedTuple):
    """The answer of an HTTP server."""

    status: int
    reason: str
    body: bytes


class FetchError(Exception):
    """The request failed; the text says why."""


def fetch(url: str, authorization: str = "") -> Answer:
    """GET a page. Raises FetchError, OSError, HTTPException or ValueError."""
    for _ in range(REDIRECTS + 1):
        request = urllib.request.Request(url)  # noqa: S310 - http or https: _target and Prometheus check it
        if authorization:
            request.add_unredirected_header("Authorization", authorization)
        with _opened(request) as answer:
            if answer.status not in REDIRECTING:
                return Answer(answer.status, answer.reason or "", _body(answer))
            url = _target(url, answer.headers.get("Location") or "")
        authorization = ""  # a redirect must not get the password
    raise FetchError(f"it redirects more than {REDIRECTS} times")


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Return or raise what `work` does, in a thread that is abandoned after `seconds`. Raises TimeoutError then.

    A socket's timeout restarts with each byte, so a server that sends slowly could block it forever.
    """
    done: queue.Queue[tuple[ResultT | None, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error there is a result


def _opened(request: urllib.request.Request) -> HTTPResponse:
    """Open the URL and return the answer of any status. The default opener would also open file:, ftp: and data:."""
    proxies: dict[str, str] | None = {} if _is_loopback(request.host) else None  # None: those of the environment
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(proxies), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        opener.add_handler(handler)
    answer = opener.open(request, timeout=ANSWERS_WITHIN)
    if not isinstance(answer, HTTPResponse):
        raise FetchError("neither http nor https")
    return answer


def _is_loopback(netloc: str) -> bool:
    """Return whether the host is this machine, which a proxy cannot reach."""
    host = (urllib.parse.urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _body(answer: HTTPResponse) -> bytes:
    limit = BODY_LIMIT if answer.status == 200 else REFUSAL_LIMIT
    body = answer.read(limit + 1)
    if len(body) > limit and answer.status == 200:
        raise FetchError(f"its answer has more than {limit // 1024**2} MiB")
    return body[:limit]


def _target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises FetchError if it is not allowed."""
    target = urllib.parse.urljoin(url, location)
    before, after = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
    is_allowed = after.scheme in ("http", "https") and after.hostname and "@" not in after.netloc
    if not is_allowed or (before.scheme == "https" and after.scheme == "http"):
        raise FetchError(f"it redirects from {before.scheme} to {target[:200]!r}")
    return target
