"""Pages shared by simultaneous requests: rendered once for all of them, and sent in parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anyio import to_thread
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_exporter.exposition.scrape import Form
from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Page

METRICS = "/metrics"


class Pages:
    """Renders each page after the requests for it have arrived, once for all of them.

    No response is older than its request. Clients that send requests as fast as they can delay a scrape by at most one
    page in its four forms, and cause at most fifty pages a second.
    """

    def __init__(self, make: Callable[[Collection[Form]], dict[Form, bytes]]) -> None:
        self._make = make
        self._wanted: dict[Form, asyncio.Future[Page]] = {}
        self._earliest = 0.0  # time of the next page, on the event loop's clock

    async def next(self, form: Form) -> Page:
        """Return the next page, rendered in the next iteration of the event loop, or PAGE_INTERVAL after the last."""
        loop = asyncio.get_running_loop()
        if not self._wanted:
            loop.call_at(self._earliest, self._answer)
        # Shielded: a client that disconnects does not cancel the page of the others.
        return await asyncio.shield(self._wanted.setdefault(form, loop.create_future()))

    def _answer(self) -> None:
        wanted, self._wanted = self._wanted, {}
        try:
            bodies = self._make(wanted)
        except Exception as error:
            for future in wanted.values():
                future.set_exception(error)
            return
        finally:
            self._earliest = asyncio.get_running_loop().time() + limits.PAGE_INTERVAL
        for form, future in wanted.items():
            future.set_result(Page(bodies[form]))


class SingleFlight:
    """Renders a slow page on a thread, once for all requests that wait, at most once in SLOW_PAGE_INTERVAL.

    Clients that request it in a loop get it once an interval, and cannot make it take more than SLOW_PAGE_SHARE of a
    CPU. No response is older than its request. Pages about different subjects are rendered one at a time.
    """

    def __init__(self, make: Callable[..., str]) -> None:
        self._make = make
        self._lock = asyncio.Lock()  # its waiters proceed in the order of their arrival
        self._next: dict[tuple[str, ...], asyncio.Task[str]] = {}  # by subject
        self._earliest = 0.0  # time of the next page, on the event loop's clock
        self._cpu_seconds = 0.0  # of the last page

    async def next(self, *subject: str) -> str:
        """Return the next page, shared by all requests until its rendering begins. Raises what `make` raises."""
        if subject not in self._next:
            self._next[subject] = asyncio.create_task(self._render(subject))
        return await asyncio.shield(self._next[subject])

    async def _render(self, subject: tuple[str, ...]) -> str:
        loop = asyncio.get_running_loop()
        async with self._lock:
            await asyncio.sleep(self._earliest - loop.time())
            began = loop.time()
            del self._next[subject]
            try:
                return await to_thread.run_sync(self._make_timed, subject)
            finally:
                self._earliest = self.earliest_after(began)

    def earliest_after(self, began: float) -> float:
        """Return when the next page may be rendered, after one that began then and has just ended."""
        return began + max(limits.SLOW_PAGE_INTERVAL, self._cpu_seconds / limits.SLOW_PAGE_SHARE)

    def _make_timed(self, subject: tuple[str, ...]) -> str:
        began = time.thread_time()
        try:
            return self._make(*subject)
        finally:
            self._cpu_seconds = time.thread_time() - began


class PacedPages:
    """ASGI middleware that passes requests for all pages but `/metrics` on one at a time, one in REQUEST_INTERVAL.

    It also bounds the cost of refused requests without a password. Those of closed connections are dropped.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lock = asyncio.Lock()  # its waiters proceed in the order of their arrival
        self._earliest = 0.0  # time of the next request, on the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on in its turn; one for `/metrics`, or the start and stop of the server, at once."""
        if scope["type"] == "http" and scope["path"] != METRICS:
            async with self._lock:
                if (connection := _connection(scope)) and connection.is_lost:
                    return
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._earliest - loop.time())
                self._earliest = loop.time() + limits.REQUEST_INTERVAL
        await self._app(scope, receive, send)


async def wait_for_turn(scope: Scope) -> None:
    """Wait until the request's connection has its turn."""
    if connection := _connection(scope):
        await connection.wait_for_turn()


@contextmanager
def track_page(page: Page, scope: Scope) -> Iterator[None]:
    """Count the page as being sent on the request's connection."""
    connection = _connection(scope)
    if connection:
        connection.start_sending(page)
    try:
        yield
    finally:
        if connection:
            connection.end_sending()


async def send_body(parts: Iterable[bytes], scope: Scope, send: Send) -> None:
    """Send a body in blocks. The buffer of a client that does not read holds one block; the rest is shared."""
    connection = _connection(scope)
    blocks = _blocks(parts)
    body = next(blocks, b"")
    while True:
        following = next(blocks, None)
        await send({"type": "http.response.body", "body": body, "more_body": following is not None})
        if following is None or (connection and connection.is_lost):
            return
        body = following


def _blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts in blocks of at most WRITE_BYTES."""
    waiting: list[bytes] = []
    size = 0
    for one in parts:
        for start in range(0, len(one), limits.WRITE_BYTES):
            block = one[start : start + limits.WRITE_BYTES]
            if size + len(block) > limits.WRITE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
            waiting.append(block)
            size += len(block)
    if waiting:
        yield b"".join(waiting)


class SharedResponse(Response):
    """JSON in parts that other answers have, too. It is sent in turn, as `/metrics` is."""

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        """Set the parts of the body, and more headers."""
        size = str(sum(map(len, parts)))
        super().__init__(media_type="application/json", headers={**headers, "Content-Length": size})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's interface
        """Send the response; to HEAD, without its body."""
        await wait_for_turn(scope)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_body(self._parts if scope["method"] == "GET" else (), scope, send)


def _connection(scope: Scope) -> Any:
    return scope.get("state", {}).get("connection")  # None in tests without the exporter's server
