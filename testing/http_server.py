"""A server on loopback that answers as a test says."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def http_server(answer: Answer, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer each GET request by the function until the block ends; the value is the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            """Write no line for each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # tests want clients that hang up
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it checks whether to end
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def answers(body: bytes, status: int = 200, **headers: str) -> Answer:
    """Return the function that answers every request like this."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer
