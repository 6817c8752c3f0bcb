"""Basic auth for every page and configured headers in every response, from the web configuration file."""

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
    """ASGI middleware that checks the credentials of each request. `current` returns the current configuration."""

    def __init__(self, application: Application, current: Callable[[], WebConfig]) -> None:
        self._application = application
        self._current = current
        self._passwords = Passwords()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the request on if its credentials are valid; otherwise answer 401, or 503 if the client should retry."""
        if scope["type"] != "http":  # start and stop of the server; websockets are disabled
            await self._application(scope, receive, send)
            return
        config = self._current()
        send = _with_headers(send, config.headers)
        try:
            is_authenticated = not config.users or await self._is_authenticated(scope, config.users)
        except TooManyChecksError:
            await _answer(send, 503, b"Too many password checks in progress\n", (b"retry-after", b"1"))
            return
        if is_authenticated:
            await self._application(scope, receive, send)
        else:
            await _answer(send, 401, b"Unauthorized\n", (b"www-authenticate", b'Basic realm="rankscope-exporter"'))

    async def _is_authenticated(self, scope: Message, users: Mapping[str, bytes]) -> bool:
        given = credentials(dict(scope["headers"]).get(b"authorization", b""))
        if given is None:
            return False
        connection = scope.get("state", {}).get("connection")  # None in tests without the exporter's server
        if connection is None:
            return await self._passwords.verify(users, *given)
        return await self._passwords.verify(users, *given, connection.address, lambda: connection.is_lost)


def credentials(header: bytes) -> tuple[str, bytes] | None:
    """Return user and password of an Authorization header (RFC 7617), or None if it has none."""
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

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *extra]
        await send(message)

    return send_with_headers
