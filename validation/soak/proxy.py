"""A proxy between Prometheus and an exporter that can delay scrapes."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from email.message import Message
from http.server import BaseHTTPRequestHandler

from testing.http_server import LoopbackServer

PASSED_ON = ("Accept", "Accept-Encoding", "X-Prometheus-Scrape-Timeout-Seconds")
PASSED_BACK = ("Content-Type", "Content-Encoding")


class Proxy(LoopbackServer):
    """A server on loopback; `delay` is the seconds before a scrape is passed on."""

    def __init__(self, url: str) -> None:
        self.delay = 0.0
        self._url = url
        super().__init__(self._pass_on)
        self.address = f"127.0.0.1:{self.port}"

    def _pass_on(self, scrape: BaseHTTPRequestHandler) -> None:
        time.sleep(self.delay)
        headers = {name: scrape.headers[name] for name in PASSED_ON if name in scrape.headers}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self._url + scrape.path, headers=headers), timeout=60
            ) as answer:
                _pass_back(scrape, answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            _pass_back(scrape, error.code, error.headers, error.read())
        except OSError:
            scrape.close_connection = True  # the exporter is down, or Prometheus gave up


def _pass_back(scrape: BaseHTTPRequestHandler, status: int, headers: Message, body: bytes) -> None:
    scrape.send_response(status)
    for name in PASSED_BACK:
        if value := headers.get(name):
            scrape.send_header(name, value)
    scrape.send_header("Content-Length", str(len(body)))
    scrape.end_headers()
    scrape.wfile.write(body)
