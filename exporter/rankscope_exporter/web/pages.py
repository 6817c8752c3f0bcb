"""Pages for many clients at once: one look at the collectors for all that ask meanwhile, and sent in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from anyio import to_thread
from starlette.types import Scope, Send

from rankscope_exporter.exposition.scrape import Form
from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Page


class Pages:
    """Pages that are made after they were asked for, each for all who asked until then.

    So nobody gets a page older than the request, and clients that ask as fast as they can cost a scrape of somebody
    else's no more than one page, in the four forms that it may have, and the processor no more than fifty a second.
    """

    def __init__(self, make: Callable[[Collection[Form]], dict[Form, bytes]]) -> None:
        self._make = make
        self._wanted: dict[Form, asyncio.Future[Page]] = {}
        self._next = 0.0  # when one may be made again, by the event loop's clock

    async def next(self, form: Form) -> Page:
        """The page of the event loop's next turn, or soon after the last one: all who ask until then get it, too."""
        loop = asyncio.get_running_loop()
        if not self._wanted:
            loop.call_at(self._next, self._answer)
        # Shielded: who leaves takes nobody else's page with him.
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
            self._next = asyncio.get_running_loop().time() + limits.PAGES_APART
        for form, future in wanted.items():
            future.set_result(Page(bodies[form]))


class SingleFlight:
    """A page that takes long to make: on a thread, one at a time, and after each a rest that is as long.

    So it takes half of the interpreter's lock at the most, however many ask; nobody gets one older than the request.
    """

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[str] | None = None
        self._due = 0.0  # when the next may begin, by the event loop's clock

    async def next(self) -> str:
        """The page that is made next: all who ask until it begins get it. Raises what making it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._made())
        return await asyncio.shield(self._next)

    async def _made(self) -> str:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._due - loop.time())
            began, self._next = loop.time(), None
            try:
                return await to_thread.run_sync(self._make)
            finally:
                self._due = 2 * loop.time() - began


async def turn(scope: Scope) -> None:
    """Wait until something may be done for the connection that the request came by."""
    if connection := _connection(scope):
        await connection.turn()


@contextmanager
def held(page: Page, scope: Scope) -> Iterator[None]:
    """Count the page among those that are held, for the connection that the request came by."""
    connection = _connection(scope)
    if connection:
        connection.sends(page)
    try:
        yield
    finally:
        if connection:
            connection.has_sent()


async def send_page(page: Page, scope: Scope, send: Send) -> None:
    """Send a page's body, in pieces: a client that does not read has a piece of its own, and shares the rest."""
    connection = _connection(scope)
    for start in range(0, max(1, len(page.body)), limits.SENT_AT_ONCE):
        end = start + limits.SENT_AT_ONCE
        body = page.body[start:end]
        await send({"type": "http.response.body", "body": body, "more_body": end < len(page.body)})
        if connection and connection.is_lost:
            return


def _connection(scope: Scope) -> Any:
    return scope.get("state", {}).get("connection")  # none where there is no server of ours, in a test
