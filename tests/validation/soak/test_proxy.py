"""The proxy delays scrapes as configured, and is down when the exporter is."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from validation.soak.proxy import Proxy


class Exporter(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"up 1\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy():
    server = HTTPServer(("127.0.0.1", 0), Exporter)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}")
    proxy.start()
    yield proxy
    proxy.stop()
    server.shutdown()
    server.server_close()
    thread.join()


def scraped(proxy, path="/metrics"):
    with urllib.request.urlopen(f"http://{proxy.address}{path}", timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_a_scrape_is_delayed_as_configured(proxy):
    proxy.delay = 0.3
    began = time.monotonic()
    assert scraped(proxy) == ("text/plain", b"up 1\n")
    assert time.monotonic() - began >= 0.3


def test_an_error_of_the_exporter_is_passed_on(proxy):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scraped(proxy, "/nothing")


def test_an_exporter_that_is_down_does_not_answer():
    proxy = Proxy("http://127.0.0.1:9")
    proxy.start()
    with pytest.raises(OSError, match=r"Remote end closed|reset"):
        scraped(proxy)
    proxy.stop()
