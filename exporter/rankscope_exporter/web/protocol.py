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


class TlsTransport(asyncio.Transport):
    """TLS on top of a socket's transport, with the methods that uvicorn uses.

    uvloop's own TLS has a buffer of 256 KiB for each connection, and takes more CPU time for a handshake.
    """

    def __init__(self, lower: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self.is_established = False
        self._lower = lower
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=True)

    def decrypt(self, data: bytes) -> bytes:
        """Return the content of received data; continue the handshake if it is incomplete. Close if it is not TLS."""
        parts = []
        self._received.write(data)
        try:
            if not self.is_established:
                self._tls.do_handshake()
                self.is_established = True
            while self._received.pending or self._tls.pending():
                parts.append(self._tls.read(limits.PARSE_BYTES))
                if not parts[-1]:  # close_notify: the client sends no more, as after a TCP FIN
                    self.close()
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:  # no TLS, no common parameters, or damaged data
            self._flush()  # the alert
            self._lower.close()
        self._flush()
        return b"".join(parts)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send the data."""
        rest = memoryview(b"" if self.is_closing() else data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        """Close after the client has received all data. It does not wait for the client's close_notify."""
        if not self.is_closing():
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
            self._lower.close()

    def is_closing(self) -> bool:
        """Return whether the socket is closed or will be."""
        return self._lower.is_closing()

    def _flush(self) -> None:
        if self._unsent.pending and not self.is_closing():
            self._lower.write(self._unsent.read())


class BoundedProtocol(HttpToolsProtocol):
    """One connection of the server, also used by `Connections`.

    TLS starts here, not in the listening socket, where a connection would not be counted before its handshake ends,
    and handshakes would not take turns. With an RSA key of 4,096 bits, one blocks the event loop for about 5 ms.
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
        self._socket: asyncio.Transport | None = None
        self._secured: TlsTransport | None = None  # on top of the socket, from the first data of the handshake
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
        self._socket, self.flow = transport, FlowControl(transport)
        self.address = client_network((transport.get_extra_info("peername") or ("",))[0])
        self._update_deadline()
        self._all_connections.add(self)
        if self._tls is None:
            self._begin(transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Do what uvicorn's `connection_made` does, without its two system calls for unused addresses.

        At each of them another thread may acquire the GIL and keep it for a while.
        """
        self.connections.add(self)
        self.transport = transport
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
        self._socket = self._secured = None
        self._cycles = []
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Handle received data, now or in the connection's turn."""
        self._unparsed += data
        if self._socket and not self._queue.run_or_queue(self, self._receive):
            self._socket.pause_reading()  # the kernel buffers the rest

    def _receive(self) -> None:
        data, self._unparsed = self._unparsed, b""
        for start in range(0, len(data), limits.PARSE_BYTES):
            if self._socket is None or self._socket.is_closing():
                return
            if self._tls and not self._secured:
                self._secured = TlsTransport(self._socket, self._tls())
            part = data[start : start + limits.PARSE_BYTES]
            self._received += len(part)  # encrypted: TLS records without content, which OpenSSL may answer, count, too
            self._parse(self._decrypt(self._secured, part) if self._secured else part)
        if self._socket and not self.flow.read_paused:
            self._socket.resume_reading()

    def _decrypt(self, secured: TlsTransport, data: bytes) -> bytes:
        content = secured.decrypt(data)
        if secured.is_established and not self.transport:
            self._begin(secured)
        return content

    def _parse(self, data: bytes) -> None:
        if self._socket is None or self._socket.is_closing():
            pass
        elif self._received <= limits.REQUEST_BYTES:
            if data:
                super().data_received(data)
        elif not self.transport:  # still in the handshake
            self._socket.close()
        elif self.cycle and self.cycle.scope is self.scope:  # the headers are complete, maybe the response, too
            self.cut_off("request too large")
        else:
            self._reject(431)
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
        self.transport.close()

    def _is_closing(self) -> bool:
        return self._socket is None or self._socket.is_closing()

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
