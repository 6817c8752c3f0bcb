"""uvicorn's HTTP protocol with deadlines and size limits. Limits that uvicorn has options for are set in daemon.py.

uvicorn waits for the end of a request without limit, buffers a request of any size, parses any number of pipelined
requests, and waits without limit for a client to read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Connections, FairQueue, Page, RateLimitedLog, client_network

REQUESTING, RESPONDING, IDLE = "request timed out", "response not read in time", "idle"
SECONDS = {REQUESTING: limits.REQUEST_SECONDS, RESPONDING: limits.RESPONSE_SECONDS, IDLE: limits.KEEP_ALIVE_SECONDS}
LINGER_ZERO = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s


class TooManyError(Exception):
    """Raised inside the parser to stop it: the rest of the data is ignored."""


class FairHandshake(asyncio.Protocol):
    """The protocol of a socket during a TLS handshake: passes the client's data to TLS when it is the client's turn.

    With an RSA key of 4,096 bits, a handshake blocks the event loop for about 5 ms.
    """

    def __init__(self, connection: BoundedProtocol, queue: FairQueue, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._queue = queue
        self._transport = transport
        self._tls: Any = transport.get_protocol()
        self._data = b""
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        """Pass the data to TLS, now or when it is the connection's turn."""
        self._data += data
        if not self._queue.run_or_queue(self._connection, self._forward):
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Close the socket: the client sends no more, so the handshake cannot complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify TLS and the connection: TLS notifies a connection only after its handshake."""
        self._tls.connection_lost(exc)
        self._connection.connection_lost(exc)

    def end(self) -> None:
        """Connect the socket directly to TLS."""
        self._queue.drop(self._connection)
        self._transport.set_protocol(self._tls)
        self._forward()

    def _forward(self) -> None:
        data, self._data = self._data, b""
        if data:
            self._tls.get_buffer(len(data))[: len(data)] = data  # the buffer has 256 KiB, uvloop reads 250 KB
            self._tls.buffer_updated(len(data))
        if not self._transport.is_closing():
            self._transport.resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection of the server, also used by `Connections`.

    TLS starts here, not in the listening socket, where a connection would not be counted before its handshake ends.
    """

    def __init__(
        self,
        *,
        connections: Connections,
        queue: FairQueue,
        closed_log: RateLimitedLog,
        tls: Callable[[], ssl.SSLContext] | None,
        **uvicorn_options: Any,
    ) -> None:
        super().__init__(**uvicorn_options)
        self.address, self.since, self.is_lost = "", 0.0, False
        self._all_connections = connections
        self._queue = queue
        self._closed_log = closed_log
        self._tls = tls
        self._socket: asyncio.Transport | None = None  # below TLS, if there is TLS
        self._handshake: asyncio.Task[None] | None = None
        self._state = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # requests with incomplete responses
        self._received = 0  # bytes of an incomplete request
        self._has_served = False
        self._unparsed = b""  # received, but not handled before this connection's turn
        self._may_proceed = asyncio.Event()

    @property
    def is_pending(self) -> bool:
        """Return whether it waits for its turn, or for a response that its client would read.

        False for a client that pipelines requests: Prometheus does not, and each keeps the server busy for longer.
        """
        if self.pipeline:
            return False
        return self in self._queue or (self._owes_response() and not self.flow.write_paused)

    def cut_off(self, reason: str) -> None:
        """Close at once, discard unsent data, and log the reason."""
        self._closed_log.count(reason)
        self._release()
        if self._socket and not self.is_lost:
            if self._has_served:
                # A reset also frees what the kernel has buffered for a client that does not read.
                with suppress(OSError):
                    self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
            self._socket.abort()

    def start_sending(self, page: Page) -> None:
        """Record that it sends this page, in parts."""
        self._all_connections.start_sending(self, page)

    async def wait_for_turn(self) -> None:
        """Wait for the connection's turn, or until it is closed."""
        if not self.is_lost:
            self._may_proceed.clear()
            self._queue.run_or_queue(self, self._may_proceed.set)
            await self._may_proceed.wait()

    def end_sending(self) -> None:
        """Record that only the transport has data of the page."""
        self._all_connections.end_sending(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's
        """Add a new connection. With TLS, its first data starts the handshake."""
        self._socket = transport
        self.address = client_network((transport.get_extra_info("peername") or ("",))[0])
        self._update_deadline()
        self._all_connections.add(self)
        if self._tls is None:
            self._begin(transport)

    def _start_tls(self, transport: asyncio.Transport, tls: Callable[[], ssl.SSLContext], hello: bytes) -> None:
        transport.pause_reading()  # until `_queue_handshake`
        self._handshake = self.loop.create_task(self._secure(transport, tls()))
        self.loop.call_soon(self.loop.call_soon, self._queue_handshake, transport, hello)

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        if transport.is_closing():
            return
        try:
            secured = await self.loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=limits.REQUEST_SECONDS,
                ssl_shutdown_timeout=limits.REQUEST_SECONDS,
            )
        except OSError:  # includes ssl.SSLError: no TLS, no common parameters, or the client has left
            transport.abort()
            return
        if secured and not self.is_lost:
            self._begin(secured)
            cast(FairHandshake, transport.get_protocol()).end()
            if self._unparsed and self not in self._queue:  # a request that arrived during the handshake
                self.data_received(b"")

    def _queue_handshake(self, transport: asyncio.Transport, hello: bytes) -> None:
        """Insert the queue between the socket and TLS, which uvloop has set up two callbacks before."""
        if not transport.is_closing():
            FairHandshake(self, self._queue, transport).data_received(hello)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Do what uvicorn's `connection_made` does, without its two system calls for unused addresses.

        At each of them another thread may acquire the GIL and keep it for a while.
        """
        self.connections.add(self)
        if self._tls:
            transport.set_write_buffer_limits(limits.WRITE_BYTES)  # by default, TLS buffers 512 KiB of a page
        self.transport, self.flow = transport, FlowControl(transport)
        self.scheme = "https" if self._tls else "http"

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the client has left or the connection was closed."""
        self.is_lost = True
        self._release()
        if self._deadline:
            self._deadline.cancel()
        for cycle in self._cycles:  # uvicorn notifies only the last one, and another would write to a closed socket
            cycle.disconnected = True
        if self.transport:  # else the handshake did not complete
            super().connection_lost(exc)
        # Break all reference cycles. Otherwise, with a hundred connections a second, the garbage collector would stop
        # the process for 0.2 s every few seconds.
        self.parser = self.cycle = self.scope = None  # type: ignore[assignment]  # uvicorn needs them until here
        self._socket = None
        self._cycles = []
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Handle received data, now or in the connection's turn. With TLS, the first data starts the handshake."""
        self._unparsed += data
        if self._handshake and not self.transport:  # the request arrived before `_secure` continued
            return
        if not self._queue.run_or_queue(self, self._receive):
            (self.transport or cast(asyncio.Transport, self._socket)).pause_reading()  # the kernel buffers the rest

    def _receive(self) -> None:
        data, self._unparsed = self._unparsed, b""
        if self.transport:
            self._parse(data)
        elif self._socket and self._tls and not self._socket.is_closing():
            self._start_tls(self._socket, self._tls, data)

    def _parse(self, data: bytes) -> None:
        if self._is_closing():  # closed while it waited for its turn
            return
        for start in range(0, len(data), limits.PARSE_BYTES):
            part = data[start : start + limits.PARSE_BYTES]
            self._received += len(part)
            if self._received <= limits.REQUEST_BYTES:
                super().data_received(part)
            elif self.cycle and self.cycle.scope is self.scope:  # the headers are complete, maybe the response, too
                self.cut_off("request too large")
            else:
                self._reject(431)
            if self._is_closing():
                break
        else:
            if not self.flow.read_paused:
                self.transport.resume_reading()
        self._update_deadline()

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        super().on_message_begin()
        self._received = self._received or 1  # it may be in the same part as the end of the last request
        self.scope["state"]["connection"] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or reject the request if it has too many."""
        if len(self.headers) >= limits.HEADERS:
            self._reject(431)
            raise TooManyError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the response to a request, whose body may be incomplete."""
        if len(self.pipeline) >= limits.PIPELINED_REQUESTS:
            raise TooManyError
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        self._received, self._has_served = 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Update the deadline after the transport has received a whole response."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # else uvicorn's timer keeps a connection that was reset for 5 s
        self._update_deadline()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: uvicorn cancels its own timer with the next byte, whatever it is."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text adds nothing to the status
        """Reject a request that is not valid HTTP."""
        self._reject(400)

    def _release(self) -> None:
        """Release everything that the server keeps for the connection."""
        self._all_connections.remove(self)
        self._queue.drop(self)
        self._unparsed = b""
        self._may_proceed.set()

    def _reject(self, status: int) -> None:
        if self._is_closing():
            return
        if self._owes_response():  # the status line would be in the middle of a response
            self.cut_off(f"request rejected with status {status}")
            return
        self._closed_log.count(f"request rejected with status {status}")
        self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        # Close the socket, not TLS, which would wait for the client's close_notify and decrypt all data until then.
        cast(asyncio.Transport, self._socket).close()

    def _is_closing(self) -> bool:
        return self._socket is None or self._socket.is_closing() or self.transport.is_closing()

    def _update_deadline(self) -> None:
        """Start the deadline of the connection's current state if the state has changed."""
        state = self._current_state()
        if state == self._state:
            return
        self._state, self.since = state, self.loop.time()
        if self._deadline:
            self._deadline.cancel()
        self._deadline = None if self.is_lost else self.loop.call_later(SECONDS[state], self._expire)

    def _current_state(self) -> str:
        if self._owes_response() or (self.transport and self._is_closing()):
            return RESPONDING
        return IDLE if self._has_served and not self._received else REQUESTING

    def _owes_response(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expire(self) -> None:
        if self in self._queue:  # the client has sent data in time, and the server is late
            self._deadline = self.loop.call_later(limits.EXPIRY_RETRY_SECONDS, self._expire)
        elif self._state == IDLE:
            self.transport.close()  # after the rest of the response; until then the state is RESPONDING
            self._update_deadline()
        else:
            self.cut_off(self._state)


def protocol(connections: Connections, tls: Callable[[], ssl.SSLContext] | None) -> type[asyncio.Protocol]:
    """Return the factory with which uvicorn makes the protocol of a connection."""
    queue, closed_log = FairQueue(), RateLimitedLog()

    def make(**options: Any) -> BoundedProtocol:
        return BoundedProtocol(connections=connections, queue=queue, closed_log=closed_log, tls=tls, **options)

    return cast(type[asyncio.Protocol], make)
