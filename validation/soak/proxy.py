"""A proxy between Prometheus and an exporter that can delay scrapes."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSED_ON = ("Accept", "Accept-Encoding", "X-Prometheus-Scrape-Timeout-Seconds")
PASSED_BACK = ("Content-Type", "Content-Encoding")


class Proxy:
    """A server on loopback; `delay` is the seconds before a scrape is passed on."""

    def __init__(self, url: str) -> None:
        self.delay = 0.0
        self._url = url
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="proxy", daemon=True)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(proxy.delay)
                headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
                try:
                    with urllib.request.urlopen(
                        urllib.request.Request(proxy._url + self.path, headers=headers), timeout=60
                    ) as answer:
                        self._pass_back(answer.status, answer.headers, answer.read())
                except urllib.error.HTTPError as error:
                    self._pass_back(error.code, error.headers, error.read())
                except OSError:
                    self.close_connection = True  # the exporter is down, or Prometheus gave up

            def _pass_back(self, status: int, headers: Message, body: bytes) -> None:
                self.send_response(status)
                for name in PASSED_BACK:
                    if value := headers.get(name):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Prometheus has its own log."""

        return Handler
