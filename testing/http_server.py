"""A server on loopback with the answers of a test."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[[BaseHTTPRequestHandler], None]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client has hung up."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class LoopbackServer:
    """A server that answers each GET, POST and CONNECT request with a function."""

    def __init__(self, answer: Answer, context: ssl.SSLContext | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def do_POST(self) -> None:
                answer(self)

            def do_CONNECT(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                """Write no line for each request."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        # The argument is the seconds between checks for the shutdown.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.port = self._server.server_port

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def http_server(answer: Answer, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer each request with the function until the block ends. Yields the port."""
    with LoopbackServer(answer, context) as server:
        yield server.port


def answers(body: bytes, status: int = 200, **headers: str) -> Answer:
    """Return a function that gives every request this answer."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def exposition(lines: Iterable[str]) -> Answer:
    """Return a function that answers each scrape with these lines of the text format."""
    return answers(
        "".join(f"{line}\n" for line in lines).encode(), 200, **{"Content-Type": "text/plain; version=0.0.4"}
    )


def sent(request: BaseHTTPRequestHandler) -> bytes:
    """Return the body of a request."""
    return request.rfile.read(int(request.headers["Content-Length"]))
