"""What a web configuration file asks of every request: basic auth, on every page, and headers in every answer."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rankscope_exporter.web.config_file import WebConfig
from rankscope_exporter.web.passwords import Passwords, TooManyChecksError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI application in front of another. `current` is the web configuration of this moment."""

    def __init__(self, application: Application, current: Callable[[], WebConfig]) -> None:
        self._application = application
        self._current = current
        self._passwords = Passwords()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401 (or 503: ask again), or let the request through."""
        if scope["type"] != "http":  # the server's start and stop; it is told to speak no websockets
            await self._application(scope, receive, send)
            return
        config = self._current()
        send = _with_headers(send, config.headers)
        try:
            is_admitted = not config.users or await self._is_admitted(scope, config.users)
        except TooManyChecksError:
            await _answer(send, 503, b"Too many passwords wait to be checked\n", (b"retry-after", b"1"))
            return
        if is_admitted:
            await self._application(scope, receive, send)
        else:
            await _answer(send, 401, b"Unauthorized\n", (b"www-authenticate", b'Basic realm="rankscope-exporter"'))

    async def _is_admitted(self, scope: Message, users: Mapping[str, bytes]) -> bool:
        given = credentials(dict(scope["headers"]).get(b"authorization", b""))
        if given is None:
            return False
        connection = scope.get("state", {}).get("connection")  # none where there is no server of ours, in a test
        if connection is None:
            return await self._passwords.admits(users, *given)
        return await self._passwords.admits(users, *given, connection.address, lambda: connection.is_lost)


def credentials(header: bytes) -> tuple[str, bytes] | None:
    """User and password of an Authorization header (RFC 7617); None if it has none."""
    scheme, _, encoded = header.partition(b" ")
    try:
        name, separator, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if separator and scheme.lower() == b"basic" else None
    except (binascii.Error, UnicodeDecodeError):
        return None


async def _answer(send: Send, status: int, text: bytes, header: tuple[bytes, bytes]) -> None:
    headers = [header, (b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *extra]
        await send(message)

    return sending
