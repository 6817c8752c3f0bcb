"""What a web configuration file asks of every request: basic auth, on every page, and headers in every answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import bcrypt

from rankscope_exporter.web.config_file import WebConfig

BCRYPT_BYTES = 72  # bcrypt takes no more of a password; hashes made elsewhere from longer ones silently used these

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Passwords:
    """Checks passwords against bcrypt hashes; a check takes 60 ms at cost 10, so a success is remembered.

    Remembered is a digest for each user, under a key that this process alone has: neither a password nor anything
    that grows. An unknown user costs a check like any other, and one check runs at a time, so that guessing takes
    at most one core and tells nothing by its timing.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._one_at_a_time = asyncio.Lock()

    async def admits(self, users: Mapping[str, bytes], name: str, password: bytes) -> bool:
        """Whether `name` is a user and this the password."""
        hashed = users.get(name)
        digest = hmac.digest(self._key, (hashed or b"") + password, "sha256")
        if self._is_verified(name, digest):
            return True
        async with self._one_at_a_time:
            if self._is_verified(name, digest):  # by a request that was here first
                return True
            compared = hashed or next(iter(users.values()))
            matches = await asyncio.to_thread(bcrypt.checkpw, password[:BCRYPT_BYTES], compared)
            if matches and hashed:
                self._verified[name] = digest
            return matches and hashed is not None

    def _is_verified(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._verified.get(name, b""), digest)


class Gate:
    """An ASGI application in front of another. `current` is the web configuration of this moment."""

    def __init__(self, application: Application, current: Callable[[], WebConfig]) -> None:
        self._application = application
        self._current = current
        self._passwords = Passwords()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401, or let the request through."""
        if scope["type"] != "http":  # the server's start and stop; it is told to speak no websockets
            await self._application(scope, receive, send)
            return
        config = self._current()
        send = _with_headers(send, config.headers)
        if config.users and not await self._is_admitted(scope, config.users):
            await _refuse(send)
        else:
            await self._application(scope, receive, send)

    async def _is_admitted(self, scope: Message, users: Mapping[str, bytes]) -> bool:
        given = credentials(dict(scope["headers"]).get(b"authorization", b""))
        return given is not None and await self._passwords.admits(users, *given)


def credentials(header: bytes) -> tuple[str, bytes] | None:
    """User and password of an Authorization header (RFC 7617); None if it has none."""
    scheme, _, encoded = header.partition(b" ")
    try:
        name, separator, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if separator and scheme.lower() == b"basic" else None
    except (binascii.Error, UnicodeDecodeError):
        return None


async def _refuse(send: Send) -> None:
    headers = [(b"www-authenticate", b'Basic realm="rankscope-exporter"'), (b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"Unauthorized\n"})


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *extra]
        await send(message)

    return sending
