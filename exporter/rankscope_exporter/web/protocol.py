"""uvicorn's HTTP protocol with deadlines and sizes: what uvicorn has options for is set in daemon.py, this is the rest.

uvicorn by itself waits for ever for a request's end, keeps all that a client sends of it, parses any number of requests
ahead, and waits for ever for a client to read.
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
from rankscope_exporter.web.connections import Connections, Page, RateLimitedLog, Turns, whose

REQUESTING, ANSWERING, IDLE = "no complete request in time", "an answer not read in time", "idle"
SECONDS = {REQUESTING: limits.REQUEST_SECONDS, ANSWERING: limits.ANSWER_SECONDS, IDLE: limits.KEEP_ALIVE_SECONDS}
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: for no second


class TooMuchError(Exception):
    """Raised inside the parser: it stops there, and the rest of what came is never looked at."""


class HandshakeInTurns(asyncio.Protocol):
    """A socket's protocol during a TLS handshake: passes on what the client sends, each piece in its turn.

    With an RSA key of 4,096 bits a handshake computes for some 5 ms, in which the event loop does nothing else.
    """

    def __init__(self, connection: BoundedProtocol, turns: Turns, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._turns = turns
        self._transport = transport
        self._tls: Any = transport.get_protocol()
        self._data = b""
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        """Pass it on now, or in the connection's turn."""
        self._data += data
        if not self._turns.take(self._connection, self._pass_on):
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The client sends no more, so there will be no TLS: the socket closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell both: TLS does not tell a connection before its handshake has ended."""
        self._tls.connection_lost(exc)
        self._connection.connection_lost(exc)

    def end(self) -> None:
        """Leave the socket to TLS."""
        self._turns.forget(self._connection)
        self._transport.set_protocol(self._tls)
        self._pass_on()

    def _pass_on(self) -> None:
        data, self._data = self._data, b""
        if data:
            self._tls.get_buffer(len(data))[: len(data)] = data  # it has 256 KiB, uvloop reads 250 KB
            self._tls.buffer_updated(len(data))
        if not self._transport.is_closing():
            self._transport.resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection, as `Connections` sees it too.

    TLS begins here and not in the listening socket: there a connection would be nobody's before its handshake ended.
    """

    def __init__(
        self,
        *,
        connections: Connections,
        turns: Turns,
        told: RateLimitedLog,
        tls: Callable[[], ssl.SSLContext] | None,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self.address, self.since, self.is_lost = "", 0.0, False
        self._everybody = connections
        self._turns = turns
        self._told = told
        self._tls = tls
        self._socket: asyncio.Transport | None = None  # what is beneath TLS, where there is TLS
        self._handshake: asyncio.Task[None] | None = None
        self._state = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # requests whose answers are not complete
        self._received = 0  # bytes of a request that is not complete
        self._has_served = False
        self._unparsed = b""  # received, and not handled before this connection's turn
        self._turn_came = asyncio.Event()

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the server: for its turn, or for an answer that its client would read.

        A client that sends requests ahead does not: Prometheus sends none, and each keeps the server busy for longer.
        """
        if self.pipeline:
            return False
        return self._turns.has(self) or (self._is_answer_due() and not self.flow.write_paused)

    def cut_off(self, reason: str) -> None:
        """Close at once, whatever it was being sent, and log the reason."""
        self._told.note(reason)
        self._forget()
        if self._socket and not self.is_lost:
            if self._has_served:
                # By a reset: what the kernel still has for a client that does not read is freed with it.
                with suppress(OSError):
                    self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self._socket.abort()

    def sends(self, page: Page) -> None:
        """It begins to send this page, in pieces."""
        self._everybody.sends(self, page)

    async def turn(self) -> None:
        """Wait until something may be done for it, or until it is closed."""
        if not self.is_lost:
            self._turn_came.clear()
            self._turns.take(self, self._turn_came.set)
            await self._turn_came.wait()

    def has_sent(self) -> None:
        """Of the page no more is held for it than its transport has."""
        self._everybody.has_sent(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's
        """A client has connected; with TLS the handshake begins with what it sends first."""
        self._socket = transport
        self.address = whose((transport.get_extra_info("peername") or ("",))[0])
        self._settle()
        self._everybody.add(self)
        if self._tls is None:
            self._begin(transport)

    def _start_tls(self, transport: asyncio.Transport, tls: Callable[[], ssl.SSLContext], hello: bytes) -> None:
        transport.pause_reading()  # until the handshake takes turns, in `_take_turns`
        self._handshake = self.loop.create_task(self._secure(transport, tls()))
        self.loop.call_soon(self.loop.call_soon, self._take_turns, transport, hello)

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
        except OSError:  # ssl.SSLError is one, too: no TLS, no certificate in common, or the client has left
            transport.abort()
            return
        if secured and not self.is_lost:
            self._begin(secured)
            cast(HandshakeInTurns, transport.get_protocol()).end()
            if self._unparsed and not self._turns.has(self):  # a request that came before this
                self.data_received(b"")

    def _take_turns(self, transport: asyncio.Transport, hello: bytes) -> None:
        """Put the handshake's turns between the socket and TLS, where uvloop has put TLS two steps ago."""
        if not transport.is_closing():
            HandshakeInTurns(self, self._turns, transport).data_received(hello)

    def _begin(self, transport: asyncio.Transport) -> None:
        """What uvicorn's `connection_made` does, without its two system calls for addresses that no page asks for.

        At each of them another thread may take the interpreter's lock, and has it for a while.
        """
        self.connections.add(self)
        if self._tls:
            transport.set_write_buffer_limits(limits.SENT_AT_ONCE)  # by itself, TLS keeps 512 KiB of a page
        self.transport, self.flow = transport, FlowControl(transport)
        self.scheme = "https" if self._tls else "http"

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was cut off."""
        self.is_lost = True
        self._forget()
        if self._deadline:
            self._deadline.cancel()
        for cycle in self._cycles:  # uvicorn tells the last one alone, and another would write to a closed socket
            cycle.disconnected = True
        if self.transport:  # else it came no further than the handshake
            super().connection_lost(exc)
        # Nothing that this object has leads back to it any more. Else some hundred connections a second leave so much
        # to the garbage collector that it holds up everything for 0.2 s every few seconds.
        self.parser = self.cycle = self.scope = None  # type: ignore[assignment]  # uvicorn has them until here
        self._socket = None
        self._cycles = []
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Some of a request, or several; with TLS first the beginning of a handshake."""
        self._unparsed += data
        if self._handshake and not self.transport:  # the request is here before `_secure` goes on
            return
        if not self._turns.take(self, self._receive):
            (self.transport or cast(asyncio.Transport, self._socket)).pause_reading()  # the kernel keeps what follows

    def _receive(self) -> None:
        data, self._unparsed = self._unparsed, b""
        if self.transport:
            self._parse(data)
        elif self._socket and self._tls and not self._socket.is_closing():
            self._start_tls(self._socket, self._tls, data)

    def _parse(self, data: bytes) -> None:
        if self._is_closing():  # while it waited for its turn
            return
        for start in range(0, len(data), limits.PIECE):
            piece = data[start : start + limits.PIECE]
            self._received += len(piece)
            if self._received <= limits.REQUEST_BYTES:
                super().data_received(piece)
            elif self.cycle and self.cycle.scope is self.scope:  # its headers are complete, perhaps its answer, too
                self.cut_off("endless requests")
            else:
                self._refuse(431)
            if self._is_closing():
                break
        else:
            if not self.flow.read_paused:
                self.transport.resume_reading()
        self._settle()

    def on_message_begin(self) -> None:
        """The parser has seen the first byte of a request."""
        super().on_message_begin()
        self._received = self._received or 1  # it may be in the same piece as the last one's end
        self.scope["state"]["connection"] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser has a header."""
        if len(self.headers) >= limits.HEADERS:
            self._refuse(431)
            raise TooMuchError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser has a request, but for its body."""
        if len(self.pipeline) >= limits.PIPELINED:
            raise TooMuchError
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        """The parser has all of a request."""
        self._received, self._has_served = 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The last of an answer has been handed to the transport."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # else uvicorn's timer holds a connection that is reset for 5 s
        self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """Not used: uvicorn forgets it with the next byte, whatever that is."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text says no more than the status
        """What came is no HTTP."""
        self._refuse(400)

    def _forget(self) -> None:
        """Drop all that is held for it, whoever closes it."""
        self._everybody.remove(self)
        self._turns.forget(self)
        self._unparsed = b""
        self._turn_came.set()

    def _refuse(self, status: int) -> None:
        if self._is_closing():
            return
        if self._is_answer_due():  # a refusal would stand in the middle of an answer
            self.cut_off(f"requests refused with {status}")
            return
        self._told.note(f"requests refused with {status}")
        self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        # The socket, not TLS: that would wait for the client's goodbye, and decrypt all that it sends meanwhile.
        cast(asyncio.Transport, self._socket).close()

    def _is_closing(self) -> bool:
        return self._socket is None or self._socket.is_closing() or self.transport.is_closing()

    def _settle(self) -> None:
        """Begin the deadline of what the connection does now, if that is something else than before."""
        state = self._what_it_does()
        if state == self._state:
            return
        self._state, self.since = state, self.loop.time()
        if self._deadline:
            self._deadline.cancel()
        self._deadline = None if self.is_lost else self.loop.call_later(SECONDS[state], self._expire)

    def _what_it_does(self) -> str:
        if self._is_answer_due() or (self.transport and self._is_closing()):
            return ANSWERING
        return IDLE if self._has_served and not self._received else REQUESTING

    def _is_answer_due(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expire(self) -> None:
        if self._turns.has(self):  # what it has sent counts, and the server is late
            self._deadline = self.loop.call_later(limits.EXPIRED_AGAIN, self._expire)
        elif self._state == IDLE:
            self.transport.close()  # after the last of the answer; until then it is answering
            self._settle()
        else:
            self.cut_off(self._state)


def protocol(connections: Connections, tls: Callable[[], ssl.SSLContext] | None) -> type[asyncio.Protocol]:
    """What uvicorn makes a connection's protocol with."""
    turns, told = Turns(), RateLimitedLog()

    def make(**uvicorns: Any) -> BoundedProtocol:
        return BoundedProtocol(connections=connections, turns=turns, told=told, tls=tls, **uvicorns)

    return cast(type[asyncio.Protocol], make)
